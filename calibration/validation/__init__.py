"""Comparisons of predictions with measurements (rungs 1 to 4 of the ladder), and bands of simulated results."""
