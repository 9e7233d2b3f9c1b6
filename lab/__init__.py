"""The lab: the code that produces the evidence behind the house, such as GPU runs, fits, scores and benchmarks.

It imports the house, never the reverse, and no wheel contains it. `results/` has the pages that it writes.
"""
