"""Members in any order of events: random faults of a group, checked against records kept apart from
the server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockserver.core import events as ev
from lockserver.messages import RenewedMsg
from tests.lockserver.core.member_shell import LEASE_MS, MARGIN_MS, S0, S1, SB, B, Shell

ENGINE_A = {0: (S0, 10), 1: (S1, 11)}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.sampled_from([0, 1])),
        st.tuples(st.just("say again"), st.sampled_from([0, 1])),
        st.tuples(st.just("reap"), st.sampled_from([0, 1])),
        st.tuples(st.just("cut"), st.sampled_from([0, 1])),
        st.tuples(st.just("beat"), st.sampled_from([0, 1])),
        st.tuples(st.just("pass"), st.sampled_from([100, 500, 900, 3000, 6000])),
        st.tuples(st.just("stall"), st.sampled_from([1001, 9000])),
    ),
    max_size=40,
)


class Heard:
    """What the server was sent about engine-0's members, and when; recorded apart from it."""

    def __init__(self) -> None:
        self.shell = Shell()
        self.launches = 0
        self.mine: dict[int, str | None] = {0: None, 1: None}
        self.is_connected = {0: False, 1: False}
        self.heard_ms: dict[str, float] = {}
        self.reaped: set[str] = set()

    def say(self, member: int, incarnation: str | None) -> None:
        before, self.mine[member] = self.mine[member], incarnation
        if before not in (None, incarnation):
            self.reaped.add(before)
        supervisor, conn = ENGINE_A[member]
        self.shell.want(conn, supervisor, incarnation, member)
        self.is_connected[member] = True
        if incarnation is not None:
            self.heard_ms[incarnation] = self.shell.now_ms

    def step(self, what: str, which: int) -> None:
        shell = self.shell
        if what == "pass":
            shell.pass_ms(which, beating=(20,))
        elif what == "stall":
            shell.now_ms += which
            shell.hear(ev.TimePassed())
            shell.feed(ev.TimePassed())
            shell.beat(20)
        elif what == "launch":
            self.launches += 1
            self.say(which, f"engine-0-{self.launches:016x}")
        elif what == "say again":
            self.say(which, self.mine[which])
        elif what == "reap":
            self.say(which, None)
        elif what == "cut":
            shell.hear(ev.ConnectionClosed(ENGINE_A[which][1]))
            self.is_connected[which] = False
        elif self.is_connected[which] and self.mine[which] is not None:
            answered = len(shell.heard(ENGINE_A[which][1], RenewedMsg))
            shell.beat(ENGINE_A[which][1])
            if len(shell.heard(ENGINE_A[which][1], RenewedMsg)) > answered:
                self.heard_ms[self.mine[which]] = shell.now_ms

    def may_live(self, incarnation: str, at_ms: float) -> bool:
        age_ms = at_ms - self.heard_ms[incarnation]
        return incarnation not in self.reaped and age_ms < LEASE_MS + MARGIN_MS


@given(STEPS)
def test_members_in_any_order_no_grant_while_a_member_of_the_holder_may_live(steps):
    """Goal: the count of members holds in any order of events. Method: random launches, ends, cuts
    and silences of two members while another engine waits; each time the lock goes to it, no member
    of the last holder may be alive according to the separate record."""
    heard = Heard()
    shell, last = heard.shell, None
    for what, which in [("launch", 0), ("launch", 1), *steps]:
        if heard.shell.machine.supervisors.get(SB) is None:
            shell.want(20, SB, B, 0, 1, locks=())
        heard.step(what, which)
        holder = shell.active.holder
        if holder is not None and holder.engine == "engine-0":
            last = holder.lease
            shell.want(20, SB, B, 0, 1)
        elif holder is not None:
            granted_ms = holder.since_mono_ms
            assert not [w for w in last.members if heard.may_live(w.incarnation, granted_ms)]
            shell.want(20, SB, None, 0, 1)
            last = None
