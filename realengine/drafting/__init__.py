"""Proposers of draft tokens on the real engine."""
