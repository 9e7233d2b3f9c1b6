"""Diagnoses of slow runs: their symptoms, and the gain from lifting one constraint at a time."""
