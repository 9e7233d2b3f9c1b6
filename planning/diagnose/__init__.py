"""Diagnoses of slow runs: their symptoms, and what lifting one constraint at a time would gain."""
