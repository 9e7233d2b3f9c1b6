"""What prices steps: cost models, how they are fitted to measured steps, and where the time of a step goes."""
