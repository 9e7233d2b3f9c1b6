"""All measurements on a GPU, in one command that finishes inside its minutes.

`python -m lab.gpu_suite --out DIR --minutes 8`; with `--dry-run`, everything in miniature on the CPU.
"""
