"""Rung 7: whether predictions lead to the right choice among configurations that somebody else has measured."""
