"""What holds predictions against measurements: rungs 1 to 4 of the ladder, and bands on what a simulation reports."""
