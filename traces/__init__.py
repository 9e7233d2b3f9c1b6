"""Workloads and recordings: trace readers and writers, synthesis, and recorded runs."""
