"""Scheduling policies: vLLM's own, and others built on it. Each is one file; `serving.scheduler` finds them by name."""
