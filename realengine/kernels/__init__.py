"""The engine's Triton kernels; only this package imports Triton, when a kernel is first needed.

Each kernel's module has a function that launches the kernel, and `specialisations()`, which yields the configurations
to compile ahead of time.
"""
