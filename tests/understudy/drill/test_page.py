"""The page of a drill: what its data say of the records, and that nothing in them breaks out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plumbing.errors import UnderstudyError, UsageError
from tests.browser import needs_chromium, tab
from tests.understudy.drill.seen_drills import (
    of_engines,
    of_fleet,
    of_memory,
    of_model,
    of_pool,
    served,
)
from understudy.drill import page
from understudy.drill.page import check_destination, write_page
from understudy.drill.records import End, Kill, Outcome, Records
from understudy.drill.verdict import judge


def page_of(records: Records, *problems: str) -> dict[str, Any]:
    report = judge(records, len(records.kills))
    report.problems += problems
    return page.page_data(report)


def data_in(text: str) -> dict[str, Any]:
    (element,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert "<" not in element
    found: dict[str, Any] = json.loads(element)
    return found


def test_failover_has_its_phases_and_other_deaths_a_time_until_the_victim_was_back():
    """Method: an engine's death whose times are known; memory servers; a pool's part."""
    (kill,) = page_of(of_engines())["kills"]
    assert (kill["failover_ms"], kill["at_ms"], kill["new_engine"]) == (40, 100, "engine-1")
    assert kill["phases_ms"] == {"detect": 1, "fence": 10, "grant": 2, "wake": 17, "serve": 10}
    found = page_of(of_memory())
    assert found["kills"] == []
    assert found["part_kills"][1] == {"part": "gms of HOST-1", "at_ms": 200, "back_ms": 30}
    assert found["back_ms"] == {"p50": 30, "p99": 30, "max": 30}
    died = Kill("core", "a-0", killed_ms=5, model="a", phase="awake")
    (part,) = page_of(of_pool(kills=[died]))["part_kills"]
    assert part == {"part": "core of a-0, a awake", "at_ms": 5, "back_ms": None}


def test_pods_are_lanes_with_the_states_that_the_front_saw():
    found = page_of(of_fleet())
    ready, gone, again = found["lanes"][0]["states"]
    assert [gone[1], again[1]] == ["gone", "ready"]
    assert (gone[0] - ready[0], again[0] - gone[0]) == (110, 40)
    assert [(each["pod"], each["back_ms"]) for each in found["part_kills"]] == [("pod-0", 60)]


def test_of_too_many_requests_every_fault_and_an_even_choice_are_shown(
    monkeypatch: pytest.MonkeyPatch,
):
    """Goal: a page of bounded size that hides nothing bad. Method: three times its bound."""
    monkeypatch.setattr(page, "DOTS_MAX", 10)
    records = of_engines()
    records.exchanges = [served(1, float(each), each + 4.0) for each in range(30)]
    records.exchanges += [served(1, 7.5, 11, end=End.CUT), served(1, 0.5, 1, end=End.HUNG)]
    found = page_of(records)["requests"]
    dots = found["dots"]
    assert len(dots) <= 10 + 2
    assert len(dots) + found["left_out"] == found["total"] == 32
    assert {dot[2] for dot in dots} == {Outcome.OK, Outcome.BROKEN, Outcome.HUNG}
    assert [dot[0] for dot in dots] == sorted(dot[0] for dot in dots)
    assert dots[-1][0] > 25


@pytest.mark.parametrize("nasty", ["</script><script>alert(1)</script>", "<!--", "\u2028", '"\\'])
def test_nothing_in_the_data_ends_the_element_that_they_are_in(tmp_path: Path, nasty: str):
    """Goal: an engine or a problem may be called anything. Method: names that would break out."""
    records = of_engines()
    records.kills[0].new_engine = nasty
    found, target = page_of(records, nasty), tmp_path / "page.html"
    write_page(target, found)
    text = target.read_text()
    assert data_in(text) == found
    assert text.count("<script") == text.count("</script") == 2


def test_the_page_is_written_whole_or_the_reason_is_said(tmp_path: Path):
    """Goal: no half page, no lost minutes. Method: a good place, a directory, none."""
    found, target, nowhere = page_of(of_engines()), tmp_path / "report.html", tmp_path / "none/x"
    check_destination(target)
    write_page(target, found)
    assert data_in(target.read_text()) == found
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    for bad in (tmp_path, nowhere):
        with pytest.raises(UsageError, match=r"drill\.bad_report"):
            check_destination(bad)
    with pytest.raises(UnderstudyError, match=r"drill\.report_not_written"):
        write_page(nowhere, found)


@needs_chromium
async def test_a_browser_draws_it_and_keys_walk_through_it(tmp_path: Path):
    """Goal: it is read by people. Method: a real browser opens the file: what is drawn, what the
    arrow keys choose, what is printed, and that it asks for nothing and complains of nothing."""
    records = of_engines()
    records.kills.append(Kill("supervisor", "engine-1", 2, killed_ms=9000.0, new_engine="engine-0"))
    records.exchanges += [served(3, 9019, 9023), served(3, 9020, 9024, end=End.CUT)]
    target, pool, fleet = (tmp_path / f"{name}.html" for name in ("report", "pool", "fleet"))
    write_page(target, page_of(records))
    write_page(pool, page_of(of_pool(of_model("a"), kills=[Kill("pool", model="a")])))
    write_page(fleet, page_of(of_fleet()))
    async with tab(tmp_path) as shown:
        await shown.go(fleet.as_uri())
        assert await shown.evaluate("document.querySelectorAll('#outcomes tr').length") == 2
        assert "pod-1 ready from 0.00 s" in await shown.evaluate(
            "[...document.querySelectorAll('#kills title')].map((it) => it.textContent).join()"
        )
        await shown.go(pool.as_uri())
        assert await shown.evaluate("document.querySelectorAll('#kills tr').length") == 2
        await shown.go(target.as_uri())
        verdict = "document.getElementById('verdict').textContent"
        assert await shown.evaluate(verdict) == "✗ FAILED"
        assert await shown.evaluate("document.querySelectorAll('#kills .row').length") == 2
        assert "1 · backend-model of engine-0: 40.0 ms" in await shown.text()

        await shown.evaluate("document.querySelector('#kills [role=listbox]').focus()")
        await shown.press("ArrowRight")
        assert "2 · supervisor of engine-1: 23.0 ms" in await shown.text()
        chosen = "[...document.querySelectorAll('#kills .row')].map((row) => row.ariaSelected)"
        assert await shown.evaluate(chosen) == ["false", "true"]

        await shown.evaluate("document.querySelector('#requests svg[tabindex]').focus()")
        await shown.press("End")
        caption = "document.querySelector('#requests figcaption').textContent"
        assert "broken stream, first token after 4.0 ms" in await shown.evaluate(caption)

        paper = "getComputedStyle(document.body).backgroundColor"
        light = await shown.evaluate(paper)
        await shown.media(dark=True)
        assert await shown.evaluate(paper) != light
        await shown.media("print", dark=True)
        assert await shown.evaluate(paper) == light == "rgb(255, 255, 255)"

        assert shown.errors == []
        addresses = {each for each in shown.requests if not each.startswith("data:")}
        assert addresses <= {each.as_uri() for each in (target, pool, fleet)} | {"about:blank"}
