"""The power model against published measurements of power and of energy per token."""
