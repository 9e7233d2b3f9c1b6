"""Scheduling policies: vLLM's own, and others built on it. Each has its own file; `serving.scheduler` finds them."""
