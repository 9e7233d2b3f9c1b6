"""Measurements of costs: each module is a command, `python -m lab.benchmarks.NAME` from the root of a checkout."""
