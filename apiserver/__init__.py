"""One API before the real engine and before its twin.

API processes speak HTTP and make tokens of text and text of tokens; an engine process decides.
"""
