"""The metrics of a recorded run, and the statistics in which they are reported."""
