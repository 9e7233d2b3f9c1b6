"""Published measurements of engines that nobody here wrote: their cases, what they teach, and how far off we are.

No run is predicted with what it taught. How one case is scored is `calibration.validation.external`.
"""
