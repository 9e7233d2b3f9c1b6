"""What prices kernels: tables of measured kernel times, the surfaces fitted to them, and GPUs nobody tabulated."""
