"""Published measurements of engines that nobody here wrote: their cases, their lessons, and our errors on them.

No run is predicted with its own lesson. `calibration.validation.external` scores one case.
"""
