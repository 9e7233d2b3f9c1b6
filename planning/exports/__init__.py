"""Runs and answers in other tools' formats: tables, a report, a Perfetto trace, Prometheus metrics.

Everything that can be exported is an `Exportable`, a small class in a separate file, which names its tables. `tokentwin
export` and every download of the dashboard use the one function of `export`.
"""
