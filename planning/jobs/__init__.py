"""Long work in a process of its own: found again by its settings, and never lost with the process that started it.

A job is a directory, `ROOT/HASH`, named by the hash of its task and settings. Everything known of it lies there, in
files that are renamed into place, so any process can look: the one that started it, a later one, several at once.
"""
