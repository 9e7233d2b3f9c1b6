"""Workloads in, recordings out: trace readers and writers, synthesis, and the recorded runs themselves."""
