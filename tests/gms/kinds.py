"""Tests that run on one kind of memory only, because only that kind promises what they test."""

from __future__ import annotations

import pytest

host_only = pytest.mark.parametrize("kind", ["host"], indirect=True)
cuda_only = pytest.mark.parametrize("kind", ["cuda"], indirect=True)
