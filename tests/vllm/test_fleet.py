"""Goal: a stream of vLLM goes on in another pod as it would have in the one that was killed.

Method: some cuts of `tests/vllm/fleet_cuts`, which tries all; greedy and with a seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.conftest import RUNNER
from tests.vllm.fleet_cuts import ROWS, TOKENS, try_row, two_engines

CUTS = [(0, 0), (1, 40), (TOKENS // 2, 0), (TOKENS, 40)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with two_engines(tmp_path_factory.mktemp("vllm"), RUNNER) as found:
        yield found


@pytest.mark.parametrize("row", ROWS)
async def test_a_stream_whose_pod_is_killed_goes_on_in_another_one(
    row: str, engines: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
):
    base = tmp_path_factory.mktemp("f")  # sockets have short paths only
    assert await try_row(base, engines, ROWS[row], CUTS) == {}
