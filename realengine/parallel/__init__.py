"""Several processes: the ranks of one engine, and several engines."""
