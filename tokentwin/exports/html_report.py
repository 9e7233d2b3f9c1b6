"""Who writes the reports in HTML: the dashboard, whose figures they show and whose packages they need.

It is named here and nowhere else in this package, and loaded only when a report is asked for.
"""

from __future__ import annotations


def html_report(name: str) -> str:
    """`module:function` of the report that the file `name` of `dashboard/html_reports` makes."""
    return f"dashboard.html_reports.{name}:write_html"
