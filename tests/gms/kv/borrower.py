"""A process of an engine that borrows KV memory, obeys one command per line and says JSON lines.

Started by `kv_bench.BorrowerProcess`: `python -m tests.gms.kv.borrower DIRECTORY DEVICE ENGINE
TOKEN SIZE_BYTES WAIT_S`.
"""

from __future__ import annotations

import os
import sys

from gms.client import KvClaim, KvLease, borrow_pool, memory_for
from plumbing.errors import UnderstudyError
from plumbing.service.process import arm_from_environment
from tests.gms.client_process import fork, say
from tests.gms.kv.kv_bench import ERA, INDEX_BYTES
from tests.helpers import until


def main() -> None:
    arm_from_environment()
    directory, device, engine, token, size, wait_s = sys.argv[1:7]
    claim = KvClaim(engine, f"{engine}-{token}", int(token), ERA, int(size), INDEX_BYTES)
    try:
        lease = borrow_pool(
            directory,
            device,
            claim,
            float(wait_s),
            on_wait=lambda reason: say("waiting", reason=reason),
        )
    except UnderstudyError as error:
        reason = error.details.get("reason")
        say("refused", code=error.code, message=error.message, reason=reason)
        return
    addresses = memory_for(device).reserve(sum(lease.slab_sizes))
    addresses.map(0, lease.slabs, writable=True)
    say("lent", pool=lease.pool, is_fresh=lease.is_fresh, slabs=list(lease.slab_sizes))
    for line in sys.stdin:
        word, *rest = line.split()
        match word:
            case "write":
                addresses.write(lease.claim.size_bytes - 8, rest[0].encode().ljust(8, b"\0"))
                os.pwrite(lease.index.fileno(), rest[0].encode(), 0)
                lease.mark("begun")
                say("written")
            case "read":
                found = addresses.read(lease.claim.size_bytes - 8, 8)
                index = os.pread(lease.index.fileno(), 8, 0)
                say("content", memory=text(found), index=text(index))
            case "held":
                until_state(lease, "attached")
                say("held", pool=lease.pool)
            case "until":
                say("state", state=until_state(lease, rest[0]))
            case "fork":
                fork()
            case "give_up":
                addresses.free()
                try:
                    lease.give_up(float(rest[0]))
                except UnderstudyError as error:
                    say("refused", code=error.code, message=error.message)
                else:
                    say("freed")
            case "close":
                addresses.free()
                lease.close()
                say("closed")


def text(found: bytes) -> str:
    return found.rstrip(b"\0").decode()


def until_state(lease: KvLease, state: str) -> str:
    until(lambda: lease.state == state, f"the lease to be {state}")
    return state


if __name__ == "__main__":
    main()
