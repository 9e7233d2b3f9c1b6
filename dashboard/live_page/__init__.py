"""The Live page: a server while it runs, and the journey of the reader's own prompt through it."""
