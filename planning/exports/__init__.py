"""Runs and answers in other tools' formats: tables, a report, a Perfetto trace, Prometheus metrics.

What can be exported is an `Exportable`, a small class in a file of its own, which says what it can be written as.
`tokentwin export` and every download of the dashboard write it by the one function of `export`.
"""
