"""Predicted times of steps: cost models, their fits to measured steps, and the parts of a step's time."""
