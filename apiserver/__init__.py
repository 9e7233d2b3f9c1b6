"""One API before the real engine and before its twin: HTTP and text in API processes, decisions in an engine process."""
