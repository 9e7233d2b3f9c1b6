"""tokentwin: a digital twin of LLM serving."""

__version__ = "0.1.0"
