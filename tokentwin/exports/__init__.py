"""A recorded run in other tools' formats: tables, a report, a Perfetto trace, Prometheus metrics.

A format is a function that writes a recording to a binary file, listed in `formats`. The command line and every
download of the dashboard call the same ones.
"""
