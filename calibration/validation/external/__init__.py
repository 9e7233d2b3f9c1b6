"""Measured runs of other engines, a user's own or published ones, simulated and compared.

A case file describes the engine, the run and the measurement. Nothing here is fitted on a run that is then reported as
predicted.
"""
