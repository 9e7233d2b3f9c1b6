"""Comparisons of simulations with measured runs of other engines, which are published or a user's own.

A case file describes the engine, the run and the measurement. No run is reported as predicted if anything was fitted to
it.
"""
