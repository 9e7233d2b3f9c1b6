"""Prices of kernels: tables of measured kernel times, surfaces fitted to them, and GPUs without a table."""
