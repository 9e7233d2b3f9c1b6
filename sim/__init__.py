"""The simulator: replicas behind a router on a virtual SimPy clock, each with the shared scheduler.

This package never imports torch or the real engine. Time is integer nanoseconds.
"""

import tokentwin.serving  # noqa: F401  # its compiled core also holds modules of this package
