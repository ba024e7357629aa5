"""Tests of the model half of the reference backend; single-threaded BLAS as in the real process."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
