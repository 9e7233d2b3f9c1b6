"""The Live page: a server while it runs, and a trace of the reader's own prompt through it."""
