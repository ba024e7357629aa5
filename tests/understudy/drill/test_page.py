"""The page of a drill: what its data say of the records, and that nothing in them breaks out."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError, UsageError
from tests.browser import needs_chromium, tab
from tests.understudy.drill.seen_drills import of_model, of_pool
from understudy.drill import page
from understudy.drill.page import check_destination, render, write_page
from understudy.drill.records import (
    LOCK,
    End,
    Exchange,
    Kill,
    MemoryUse,
    Moment,
    Outcome,
    Records,
)
from understudy.drill.verdict import judge

KILLED_MS = 1000.0
MACHINE = {"cpu": "a CPU", "cpus": 2, "memory_bytes": 2**33, "kernel": "6.1", "python": "3.11"}


def answer(sent_ms: float, *, token: int = 2, end: End = End.DONE, engine: str = "engine-1"):
    """A request that got its first token after 4 ms and ended after 9."""
    first_ms = sent_ms + 4
    return Exchange(
        "p", sent_ms, end, sent_ms + 9, 200, engine, token, first_ms, first_ms, "text", "stop"
    )


def failover(killed_ms: float = KILLED_MS, old_token: int = 1) -> Kill:
    kill = Kill("backend-http", "engine-0", old_token, killed_ms)
    kill.detected_ms, kill.fenced_ms = killed_ms + 5, killed_ms + 10
    kill.granted_ms, kill.active_ms = killed_ms + 12, killed_ms + 19
    kill.new_token, kill.new_engine = old_token + 1, "engine-1"
    kill.deaths_ms = {"pid 7 (python)": killed_ms + 8, "pid 8 (python)": None}
    return kill


def one_failover() -> Records:
    lost = answer(KILLED_MS - 2, token=1, end=End.CUT, engine="engine-0")
    records = Records(exchanges=[answer(KILLED_MS + 16), lost], kills=[failover()])
    records.expected = {"p": answer(0)}
    records.grants_checked = 1
    records.moments.extend(
        [
            Moment(10.0, "engine-0", "active"),
            Moment(11.0, "engine-1", "standby"),
            Moment(12.0, LOCK, "held", "engine-0"),
            Moment(KILLED_MS + 5, "engine-0", "dead"),
            Moment(KILLED_MS + 11, LOCK, "held", "engine-1"),
            Moment(KILLED_MS + 12, "engine-1", "waking"),
            Moment(KILLED_MS + 19, "engine-1", "active"),
            Moment(KILLED_MS + 5000, "engine-0", "init"),
        ]
    )
    return records


def page_of(records: Records) -> dict:
    report = judge(records, len(records.kills))
    return page.page_data(records, report, "reference", MACHINE, "2030-01-01T00:00:00.000Z")


def data_in(text: str) -> dict:
    (element,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert "<" not in element
    return json.loads(element)


def test_a_kill_has_its_phases_moments_deaths_and_requests():
    """Goal: one timeline from all who saw something. Method: a failover whose times are known."""
    found = page_of(one_failover())
    (kill,) = found["kills"]
    assert kill["failover_ms"] == 20
    expected = {"detect": 5, "fence": 5, "grant": 2, "wake": 7, "serve": 1}
    assert kill["phases_ms"] == expected
    assert sum(kill["phases_ms"].values()) == kill["failover_ms"]
    assert kill["moments_ms"]["first token"] == 20
    assert kill["deaths_ms"] == {"pid 7 (python)": 8, "pid 8 (python)": None}
    lost, served = kill["requests"]
    assert lost == [-2, 2, 7, Outcome.BROKEN, "engine-0", None]
    assert served == [16, 20, 25, Outcome.OK, "engine-1", None]


def test_lanes_say_what_each_part_was_from_edge_to_edge_of_the_timeline():
    """Goal: no gap, nothing from outside. Method: states long before, within and after it."""
    (kill,) = page_of(one_failover())["kills"]
    start, end = kill["from_ms"], kill["to_ms"]
    assert start < 0
    assert end > kill["failover_ms"]
    assert kill["lanes"] == {
        "engine-0": [[start, 5, "active", ""], [5, end, "dead", ""]],
        "engine-1": [
            [start, 12, "standby", ""],
            [12, 19, "waking", ""],
            [19, end, "active", ""],
        ],
        LOCK: [[start, 11, "held", "engine-0"], [11, end, "held", "engine-1"]],
    }
    assert list(kill["lanes"]) == ["engine-0", "engine-1", LOCK]


def test_deaths_of_other_parts_are_there_with_the_time_until_they_were_back():
    """Goal: a drill that kills no engine has a page, too. Method: memory servers, of which one did
    not come back, and a lock server between them."""
    kills = [
        Kill("gms", killed_ms=100.0, back_ms=600.0, device="HOST-0"),
        Kill("lockserver", killed_ms=700.0, back_ms=800.0),
        Kill("gms", killed_ms=1100.0, device="HOST-0"),
    ]
    records = Records(kills=kills, memory=MemoryUse(100, 100, 100))
    found = page_of(records)
    assert found["part_kills"] == [
        {"part": "gms of HOST-0", "at_ms": 0, "back_ms": 500},
        {"part": "lockserver", "at_ms": 600, "back_ms": 100},
        {"part": "gms of HOST-0", "at_ms": 1000, "back_ms": None},
    ]
    assert found["back_ms"] == {"p50": 100, "p99": 500, "max": 500}
    assert data_in(render(found)) == found


def test_of_too_many_requests_every_fault_and_an_even_choice_are_shown():
    """Goal: a page of bounded size that hides nothing bad. Method: three times its bound."""
    total = 3 * page.DOTS_MAX + 7
    records = Records(exchanges=[answer(float(each)) for each in range(total - 2)])
    records.exchanges += [answer(total / 2, token=1, end=End.CUT), answer(0.5, end=End.HUNG)]
    records.expected = {"p": answer(0)}
    found = page_of(records)["requests"]
    dots = found["dots"]
    assert len(dots) <= page.DOTS_MAX
    assert len(dots) + found["left_out"] == found["total"] == total
    assert found["left_out"] == 0 or total > page.DOTS_MAX
    assert {dot[2] for dot in dots} == {Outcome.OK, Outcome.BROKEN, Outcome.HUNG}
    assert [dot[0] for dot in dots] == sorted(dot[0] for dot in dots)
    assert dots[-1][0] > 0.99 * (total - 3)


@pytest.mark.parametrize("nasty", ["</script><script>alert(1)</script>", "<!--", "\u2028", '"\\'])
def test_nothing_in_the_data_ends_the_element_that_they_are_in(nasty: str):
    """Goal: a process or problem may be called anything. Method: names that would break out."""
    records = one_failover()
    records.kills[0].deaths_ms = {nasty: 1.0}
    report = judge(records, 1)
    report.problems.append(nasty)
    found = page.page_data(records, report, nasty, MACHINE, "now")
    text = render(found)
    assert data_in(text) == found
    assert text.count("<script") == text.count("</script") == 2


def test_the_page_is_written_whole_or_the_reason_is_said(tmp_path: Path):
    """Goal: no half page, no lost minutes. Method: a good place, a directory, none, a full path."""
    found = page_of(one_failover())
    target = tmp_path / "report.html"
    check_destination(target)
    write_page(target, found)
    assert data_in(target.read_text()) == found
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    for bad in (tmp_path, tmp_path / "none" / "report.html"):
        with pytest.raises(UsageError, match="choose a file in a writable directory") as caught:
            check_destination(bad)
        assert caught.value.code == "drill.bad_report"
    with pytest.raises(UnderstudyError, match="cannot write the report page") as failed:
        write_page(tmp_path / "none" / "report.html", found)
    assert failed.value.code == "drill.report_not_written"


def test_page_has_a_lane_for_each_model_with_reasons_and_pauses():
    moments = [
        Moment(0.0, "model a", "awake", "a-0 serves"),
        Moment(100.0, "model a", "draining", "b waits for room"),
        Moment(400.0, "model a", "awake", "a-0 serves"),
    ]
    records = of_pool(of_model("a", 50.0, 110.0, 120.0, 420.0, 430.0), moments=deque(moments))
    report = judge(records, 0)
    data = page.page_data(records, report, "reference", MACHINE, "now")
    lane, other = data["pool"]["models"]
    assert lane["spans"] == [
        [0.0, 100.0, "awake", "a-0 serves"],
        [100.0, 400.0, "draining", "b waits for room"],
        [400.0, 2000.0, "awake", "a-0 serves"],
    ]
    assert lane["requests"][-1] == [0.0, 50.0, 430.0, "ok", "a-0", [[120.0, 420.0]]]
    assert other["spans"] == []
    assert lane["left_out"] == 0


@needs_chromium
def test_a_browser_draws_it_and_keys_walk_through_it(tmp_path: Path):
    """Goal: it is read by people. Method: a real browser opens the file: what is drawn, what the
    arrow keys choose, what is printed, and that it asks for nothing and complains of nothing."""
    records = one_failover()
    records.kills.append(failover(KILLED_MS + 9000, old_token=2))
    records.exchanges += [answer(KILLED_MS + 9019, token=3)]
    records.grants_checked = 2
    target = tmp_path / "report.html"
    write_page(target, page_of(records))

    async def main() -> None:
        async with tab(tmp_path) as shown:
            await shown.go(target.as_uri())
            assert await shown.evaluate("document.getElementById('verdict').textContent") == (
                "✗ FAILED"
            )
            assert await shown.evaluate("document.querySelectorAll('#kills .row').length") == 2
            assert "1 · backend-http of engine-0: 20.0 ms" in await shown.text()

            await shown.evaluate("document.querySelector('#kills [role=listbox]').focus()")
            await shown.press("ArrowRight")
            words = await shown.evaluate(
                "document.querySelector('#timeline p:last-child').innerText"
            )
            assert words.startswith("Kill 2 · backend-http of engine-0")
            assert "first token at 23.0 ms" in words
            chosen = "[...document.querySelectorAll('#kills .row')].map((row) => row.ariaSelected)"
            assert await shown.evaluate(chosen) == ["false", "true"]

            await shown.evaluate("document.querySelector('#requests svg[tabindex]').focus()")
            await shown.press("Home")
            caption = "document.querySelector('#requests figcaption').textContent"
            assert "broken stream, first token after 4.0 ms" in await shown.evaluate(caption)

            paper = "getComputedStyle(document.body).backgroundColor"
            light = await shown.evaluate(paper)
            await shown.media(dark=True)
            assert await shown.evaluate(paper) != light
            await shown.media("print", dark=True)
            assert await shown.evaluate(paper) == light == "rgb(255, 255, 255)"
            buttons = "getComputedStyle(document.querySelector('.controls')).display"
            assert await shown.evaluate(buttons) == "none"

            assert shown.errors == []
            assert {each for each in shown.requests if not each.startswith("data:")} <= {
                target.as_uri(),
                "about:blank",
            }

    asyncio.run(main())
