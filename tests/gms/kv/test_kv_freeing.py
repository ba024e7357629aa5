"""KV memory that is freed by an operator, or by an engine that rests, also without the service."""

from __future__ import annotations

import os
import signal

from plumbing.pod.paths import gms_journal
from tests.gms.kinds import host_only
from tests.gms.kv.kv_bench import Borrow, KvProcess, drop_kv
from tests.helpers import open_fds, until


@host_only
def test_operator_frees_idle_memory_and_is_told_who_holds_it(kv: KvProcess, borrow: Borrow):
    """Goal: `gms drop-kv` frees what no engine uses, and says who does. Method: a holder, a child
    that outlives it, nobody, and nothing left."""
    os.close(os.open(gms_journal(kv.directory, kv.device), os.O_CREAT | os.O_WRONLY))
    assert drop_kv(kv) == (0, "already_empty")
    first = borrow(1)
    first.expect("lent")
    code, said = drop_kv(kv)
    assert (code, f"lent to engine-1 (token 1, pid {first.pid})" in said) == (1, True)
    child = first.do("fork")["pid"]
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: kv.status()["state"] == "idle", "the end of its session")
    code, said = drop_kv(kv)
    assert (code, f"still mapped by pid {child}" in said) == (1, True)
    os.kill(child, signal.SIGKILL)
    until(lambda: drop_kv(kv) == (0, "freed"), "its memory")
    assert (kv.status()["state"], kv.status()["pool_bytes"]) == ("empty", 0)


@host_only
def test_memory_that_is_given_up_is_free_when_the_service_says_so(kv: KvProcess, borrow: Borrow):
    """Goal: an engine that rests really frees its KV memory, and can have new memory at once.
    Method: two processes of one engine; the kernel's own list of what the server holds."""

    def slabs() -> set[str]:
        """By name: the server has copies for a moment, to send them."""
        links = open_fds(kv.process.pid).values()
        return {link for link in links if "understudy_kv-" in link}

    first, mate = borrow(1), borrow(1)
    for each in (first, mate):
        pool = each.expect("lent")["pool"]
    assert len(slabs()) == 2  # and the index
    mate.ask("give_up 20")
    until(lambda: kv.status()["sessions"][1]["state"] == "leaving", "it to be heard")
    assert len(slabs()) == 2
    assert first.do("give_up 20")["is"] == "freed"
    assert slabs() == set()
    assert mate.expect("freed")
    assert (kv.status()["state"], kv.status()["sessions"]) == ("empty", [])
    again = borrow(1).expect("lent")
    assert again["is_fresh"]
    assert again["pool"] != pool


@host_only
def test_memory_that_is_given_up_while_the_service_is_away_is_free(kv: KvProcess, borrow: Borrow):
    """Goal: a rest does not depend on the service. Method: kill it; give up; the next server finds
    nothing."""
    first = borrow(1)
    first.expect("lent")
    kv.kill()
    first.do("until rejoining")
    assert first.do("give_up 0.1")["is"] == "freed"
    kv.start()
    until(lambda: kv.status()["state"] == "empty", "the file that is left to be removed")
