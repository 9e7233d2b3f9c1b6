"""The formats of traces: how they are read, and written."""
