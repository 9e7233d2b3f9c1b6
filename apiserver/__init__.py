"""One HTTP API in front of the real engine and of its twin.

API processes speak HTTP and convert text to tokens and tokens to text; an engine process schedules.
"""
