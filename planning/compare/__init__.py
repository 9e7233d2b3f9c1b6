"""Comparisons of two deployments or policies, and the differences between them that can be claimed."""
