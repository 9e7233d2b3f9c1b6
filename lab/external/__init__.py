"""Published measurements of engines that nobody here wrote: their cases, the fit to them, and our errors on them.

No run is predicted with evidence from itself. `tokentwin.calibration.validation.external` scores one case.
"""
