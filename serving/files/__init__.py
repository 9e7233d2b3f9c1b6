"""Files that are read as data, and written as a whole or by one writer at a time."""
