"""Questions and their answers: plan, compare, sweep, diagnose, and the code that they share.

The command line, the dashboard and the Python API are faces over this package: all of them can ask the same questions.
"""

import os

# Matrices here are small: BLAS threads that wait for each other on a busy machine make them a hundred times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
