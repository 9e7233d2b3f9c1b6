"""Models: where their weights come from, how they are stored, and what a step computes with them."""
