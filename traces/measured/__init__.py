"""Measured runs of other engines: the offered workload and the observed figures.

A format is a small class that reads the files of a tool into `MeasuredRun`s. It never smooths, drops or corrects a
measurement. Doubts about a run are stated in its `caution`.
"""
