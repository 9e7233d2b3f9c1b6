"""The metrics of a recorded run, and the figures that they are reported in."""
