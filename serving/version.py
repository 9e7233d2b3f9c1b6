"""The version that answers and recordings carry."""

__version__ = "0.2.0"
