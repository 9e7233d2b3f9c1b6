"""Rung 7: a test that predictions lead to the right choice among configurations that somebody else has measured."""
