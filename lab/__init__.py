"""The lab: what produces the evidence behind the house, such as GPU runs, fits, scores and benchmarks.

It imports the house, never the reverse, and no wheel has it. `results/` holds the pages that it writes.
"""
