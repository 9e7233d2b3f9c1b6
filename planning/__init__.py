"""Questions and their answers: plan, compare, sweep, diagnose, and what they share.

The command line, the dashboard and the Python API are faces over this package: what one of them can ask, all can.
"""
