"""What things cost: each module is a command, `python -m lab.benchmarks.NAME` from the root of a checkout."""
