"""The lab: the code that produces the published evidence: GPU runs, fits, scores and benchmarks.

The lab imports the shipped packages, never the reverse, and no wheel contains it. It writes the pages in `results/`.
"""
