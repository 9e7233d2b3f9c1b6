"""The virtual clock: SimPy replicas behind a router, each running the shared scheduler.

Never imports torch or the real engine. Time is integer nanoseconds.
"""
