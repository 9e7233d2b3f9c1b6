"""Measured runs of engines nobody here wrote: what was offered to them, and what was observed.

A format is a small class that reads files as their tool wrote them into `MeasuredRun`s. It never smooths, drops or
corrects a measurement: what is doubtful about a run is said in its `caution`.
"""
