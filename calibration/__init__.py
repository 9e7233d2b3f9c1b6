"""Measurements to cost models, and simulated runs held against real ones.

Never imports torch or the real engine: it reads recordings, whichever clock wrote them.
"""
