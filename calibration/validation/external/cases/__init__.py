"""The bundled case files: one measured run, or one table of them, each."""
