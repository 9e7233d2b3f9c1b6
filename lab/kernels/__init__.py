"""Kernel times of public tables, and the surfaces that are fitted to them: `python -m lab.kernels.fit`."""
