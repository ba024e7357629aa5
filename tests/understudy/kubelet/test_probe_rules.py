"""The kubelet's rules for probes, in virtual time and with answers by hand."""

from __future__ import annotations

import pytest

from understudy.kubelet.containers import (
    ContainerHealth,
    HttpProbe,
    Question,
    Tally,
    is_yes,
    quick_startup,
)

URL = "http://127.0.0.1:1/live"


@pytest.mark.parametrize(
    ("answers", "failures", "successes", "minds"),
    [
        ("y", 3, 1, "y"),
        ("nnn", 3, 1, "--n"),
        ("nnynnn", 3, 1, "--yyyn"),  # a yes in between starts the count anew
        ("n", 1, 1, "n"),
        ("yyn", 1, 3, "--n"),
        ("yyynny", 2, 3, "--yynn"),  # a readiness that needs three to come back
    ],
)
def test_mind_changes_after_enough_equal_answers(
    answers: str, failures: int, successes: int, minds: str
):
    """Goal: failureThreshold and successThreshold. Method: answers in, the mind after each."""
    tally = Tally(HttpProbe(URL, failure_threshold=failures, success_threshold=successes))
    letters = {None: "-", True: "y", False: "n"}
    assert "".join(letters[tally.count(each == "y")] for each in answers) == minds


@pytest.mark.parametrize(
    ("period_s", "now_s", "due_s"),
    [
        (1, 100.001, 101),  # it answered at once
        (1, 101.0, 101),  # it took its whole second: the next look is made at once
        (1, 101.4, 101),
        (1, 103.9, 103),  # what was missed is not made up for
        (5, 100.9, 105),
        (0.05, 100.01, 100.05),
    ],
)
def test_looks_keep_to_their_grid(period_s: float, now_s: float, due_s: float):
    """Goal: the kubelet's ticker. Method: a look that was due at 100 and was over at `now_s`."""
    assert HttpProbe(URL, period_s).next_due_s(100, now_s) == pytest.approx(due_s)


def health(**probes: HttpProbe) -> ContainerHealth:
    return ContainerHealth({Question(name): probe for name, probe in probes.items()})


def test_nothing_is_asked_but_startup_until_it_has_passed():
    """Goal: a slow start is not a hang. Method: what is asked before and after the first yes."""
    found = health(startup=HttpProbe(URL), liveness=HttpProbe(URL), readiness=HttpProbe(URL))
    assert found.asked_now() == (Question.STARTUP,)
    assert (found.is_started, found.is_ready) == (False, False)
    assert not found.answered(Question.STARTUP, is_ok=False)
    assert not found.answered(Question.STARTUP, is_ok=True)
    assert found.asked_now() == (Question.LIVENESS, Question.READINESS)
    assert (found.is_started, found.is_ready) == (True, False)


def test_failed_startup_and_failed_liveness_end_a_container_and_readiness_does_not():
    """Goal: what follows from each probe. Method: two noes to each, of which two are enough."""
    twice = HttpProbe(URL, failure_threshold=2)
    for question in Question:
        found = health(**{question.value: twice})
        assert not found.answered(question, is_ok=False)
        must_end = found.answered(question, is_ok=False)
        assert must_end is (question is not Question.READINESS)
        assert found.failures(question) == 2


def test_readiness_comes_and_goes():
    """Goal: `is_ready` as the kubelet has it. Method: a yes, enough noes, a yes."""
    found = health(readiness=HttpProbe(URL, failure_threshold=2))
    seen = []
    for is_ok in (True, False, False, True):
        found.answered(Question.READINESS, is_ok=is_ok)
        seen.append(found.is_ready)
    assert seen == [True, True, False, True]


def test_without_probes_a_container_is_started_and_ready():
    """Goal: Kubernetes' default. Method: none; and one of liveness alone."""
    assert (health().is_started, health().is_ready) == (True, True)
    assert health(liveness=HttpProbe(URL)).asked_now() == (Question.LIVENESS,)
    assert health(startup=HttpProbe(URL)).is_started is False


@pytest.mark.parametrize(
    ("status", "yes"),
    [(0, False), (199, False), (200, True), (302, True), (400, False), (503, False)],
)
def test_yes_is_what_the_kubelet_takes_for_one(status: int, yes: bool):
    assert is_yes(status) is yes


def test_patience_is_all_looks_together():
    """Goal: how long a first start may take. Method: the manifests' numbers, and a short one."""
    assert HttpProbe(URL, 5, failure_threshold=1440).patience_s == 7200
    assert HttpProbe(URL, 1, failure_threshold=60, initial_delay_s=3).patience_s == 63
    assert quick_startup(URL, 9).patience_s == pytest.approx(9)


def hang_found_s(probe: HttpProbe, hangs_at_s: float) -> float:
    """When a container that hangs at `hangs_at_s` is sent SIGKILL: every look takes its timeout."""
    found, due_s = health(liveness=probe), 0.0
    while True:
        now_s = due_s + (probe.timeout_s if due_s >= hangs_at_s else 0.001)
        if found.answered(Question.LIVENESS, is_ok=due_s < hangs_at_s):
            return now_s + (probe.grace_s or 0) - hangs_at_s
        due_s = max(now_s, probe.next_due_s(due_s, now_s))


def test_hung_supervisor_is_ended_within_five_seconds_whenever_it_hangs():
    """Goal: the manifests' liveness probe of an engine. Method: virtual time, hangs at any moment
    between two looks."""
    probe = HttpProbe(URL, 1, 1, failure_threshold=2, grace_s=1)
    for tenth in range(100):
        assert hang_found_s(probe, 10 + tenth / 10) <= 4.01
