"""Measured runs of other engines, a user's own or published ones, simulated and compared.

A case file says what ran and what was measured; nothing here is fitted on what is then reported as predicted.
"""
