"""Long work in a process of its own: found again by what it was asked, and never lost with who asked.

A job is a directory, `ROOT/HASH`, named by the hash of its task and settings. Everything known of it lies there, in
files that are renamed into place, so any process can look: the one that started it, a later one, several at once.
"""
