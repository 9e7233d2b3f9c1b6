"""Rung 4: the simulator against published measurements of engines nobody here wrote.

A case file says what ran and what was measured; nothing here is fitted on what is then reported as predicted.
"""
