"""Engines in several processes: the ranks of one engine, and several engines side by side."""
