"""The virtual clock: SimPy replicas behind a router, each running the shared scheduler.

This package never imports torch or the real engine. Time is integer nanoseconds.
"""

import serving  # noqa: F401  # its compiled core has modules of this package, too
