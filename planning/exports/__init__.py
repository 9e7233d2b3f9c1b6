"""Runs and answers in other tools' formats: tables, a report, a Perfetto trace, Prometheus metrics.

Each kind of thing that can be exported is an `Exportable`: a small class in a separate file that names its tables. The
command `tokentwin export` and every download of the dashboard use the functions in `export`.
"""
