"""A client that sends a workload to any OpenAI-compatible server, and records what it saw."""
