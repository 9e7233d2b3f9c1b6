"""Jobs: long work in separate processes that survives the process that started it.

A job is identified by its task and settings, and has a directory, `ROOT/HASH`, named by the hash of both. The files
there hold its state. They are renamed into place when complete, so any number of processes can read them at any time.
"""
