"""Threads that may wake late, by what the kernel says of them."""

from __future__ import annotations

import threading

import pytest

from engine.backends.vllm import process_tuning


def slack_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(process_tuning.current_ns()))
    thread.start()
    thread.join()
    (slack_ns,) = found
    return slack_ns


def test_only_threads_that_are_started_in_the_block_may_wake_late():
    """Goal: a library's polling threads, and no others. Method: threads before, in and after."""
    before_ns = process_tuning.current_ns()
    assert slack_of_a_new_thread() == before_ns
    with process_tuning.new_threads_may_wake_late(123_000_000):
        assert slack_of_a_new_thread() == 123_000_000
    assert process_tuning.current_ns() == before_ns
    assert slack_of_a_new_thread() == before_ns


def test_a_start_that_fails_leaves_no_slack_behind():
    """Goal: a failure is reported without delay. Method: an error in the block."""
    before_ns = process_tuning.current_ns()
    with pytest.raises(ValueError, match="boom"), process_tuning.new_threads_may_wake_late():
        raise ValueError("boom")
    assert process_tuning.current_ns() == before_ns
