"""The HTTP API, which serves requests from the real engine or from its twin (a simulated fleet).

API processes handle HTTP and convert text to tokens and tokens to text. An engine process schedules the requests.
"""
