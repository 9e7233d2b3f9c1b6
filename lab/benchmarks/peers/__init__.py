"""Other simulators of LLM serving, and ours, on the same requests."""
