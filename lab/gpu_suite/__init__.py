"""All GPU measurements, in one command that keeps to a time limit.

`python -m lab.gpu_suite --out DIR --minutes 8`; with `--dry-run`, everything in miniature on the CPU.
"""
