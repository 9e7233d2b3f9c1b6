"""Sweeps: many simulated runs from one file, and a Parquet dataset with one row for each run."""
