"""The Calibration page: the page, its inputs, its figures and its words."""
