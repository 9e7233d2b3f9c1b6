"""Fits of cost models to measurements, and comparisons of simulated runs with real ones.

This package never imports torch or the real engine. It reads the recordings of simulated and of real runs.
"""
