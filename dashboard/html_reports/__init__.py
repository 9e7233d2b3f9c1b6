"""Reports in one HTML file: the figures of a page, by the page's own functions, and what stands beside them.

A file needs no network: plotly.js is inside, once. Whatever it reports is escaped.
"""
