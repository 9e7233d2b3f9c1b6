"""The engine's Triton kernels, one idea a file; Triton is imported here and nowhere else, when first wanted.

Each kernel's module exposes the function that launches it, and `specialisations()`: the configurations it launches.
"""
