"""The hostile corpus: commands with something wrong, and what the one line of error must name.

A `Case` is a row of it. Similar rows are generated: every field of a file with every wrong value of its type.
"""
