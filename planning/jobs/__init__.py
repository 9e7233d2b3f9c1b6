"""Long work in separate processes: its settings identify it, and it is never lost with the process that started it.

A job is a directory, `ROOT/HASH`, named by the hash of its task and settings. All facts about it lie there, in files
that are renamed into place, so any process can look: the one that started it, a later one, several at once.
"""
