"""Tests that run on one kind of memory only, because only that kind promises what they test."""

from __future__ import annotations

import pytest

from tests.standin import build

host_only = pytest.mark.parametrize("kind", ["host"], indirect=True)
cuda_only = pytest.mark.parametrize("kind", ["cuda"], indirect=True)
stand_in_only = pytest.mark.skipif(
    build.REAL_GPU is not None, reason="only the stand-in for the driver can be told to do this"
)
