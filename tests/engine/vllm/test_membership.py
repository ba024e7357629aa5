"""Goal: a process that vLLM spawns is known to its supervisor by what it is.

Method: the names that vLLM gives its processes; a process that was not spawned.
"""

import pytest

from engine.backends.vllm import membership
from plumbing.errors import InvariantError


def test_a_process_that_was_not_spawned_does_not_join():
    """Goal: vLLM's main process, which has joined by itself, and a vLLM without a supervisor are
    left alone; method: this process."""
    assert membership.join() is None
    with pytest.raises(InvariantError):
        membership.current()
