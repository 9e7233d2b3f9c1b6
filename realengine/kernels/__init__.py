"""The engine's Triton kernels, one idea a file; Triton is imported only here, when it is first needed.

Each kernel's module exposes the function that launches it, and `specialisations()`: the configurations that it
launches.
"""
