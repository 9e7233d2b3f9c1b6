"""Kernel times: surfaces fitted to tables of measured times, and estimates for GPUs without a table."""
