"""The hostile corpus: what is wrong, where, and what the one line about it must name.

A `Case` is a row of it. Rows that are alike are multiplied: every field of a file by every wrong value of its type.
"""
