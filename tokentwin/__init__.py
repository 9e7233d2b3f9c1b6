"""tokentwin: a digital twin of LLM serving."""

import os

# Matrices here are small: BLAS threads that wait for each other on a busy machine make them a hundred times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"
