"""What is made of the figures of vLLM's serving benchmark, without a vLLM."""

from __future__ import annotations

from dataclasses import replace

from hack.serving_benchmark import Streamed, figures, streamed_of

TOKENS = 4
WHOLE = Streamed(10.0, 12.0, 0.5, (0.1, 1.2, 0.2), TOKENS, "")
FAILED = replace(WHOLE, ended_s=10.0, error="Traceback\n  …\nClientPayloadError: not completed")


def test_detailed_result_is_read():
    """Goal: the times are the drill's. Method: a document as the benchmark writes it."""
    document = {
        "start_times": [10.0, 11.0],
        "latencies": [2.0, 0.0],
        "ttfts": [0.5, 0.0],
        "itls": [[0.1, 1.2, 0.2], []],
        "output_lens": [TOKENS, 0],
        "errors": ["", "refused"],
        "duration": 5.0,
    }
    first, second = streamed_of(document)
    assert (first.began_s, first.ended_s, list(first.gaps_s)) == (10.0, 12.0, [0.1, 1.2, 0.2])
    assert (first.error, second.error) == ("", "refused")


def test_stream_that_ended_early_without_an_error_was_cut():
    """Goal: the benchmark calls it complete. Method: a whole stream, a short one, a failed one."""
    found = figures([WHOLE, replace(WHOLE, tokens=TOKENS - 1), FAILED], TOKENS, [])
    assert (found["requests"], found["failed"], found["cut"]) == (3, 1, 1)
    assert found["first_errors"] == ["ClientPayloadError: not completed"]
    assert found["longest_gap_ms"]["max"] == 1200.0


def test_kills_without_a_request_in_flight_prove_nothing():
    """Goal: they are told from the others. Method: kills during a stream, and behind it."""
    later = replace(WHOLE, began_s=11.0, ended_s=13.0)
    found = figures([WHOLE, later], TOKENS, [9_999.0, 10_500.0, 11_500.0, 13_001.0])
    assert (found["kills"], found["kills_under_load"], found["streams_over_a_kill"]) == (4, 2, 3)
