"""Questions and their answers: plan, compare, sweep, diagnose, and the code that they share.

The command line, the dashboard and the Python API are faces over this package: all of them can ask the same questions.
"""

import os

# Matrices here are small. On a busy machine BLAS threads wait for each other, and operations on such matrices become a
# hundred times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
