"""The messages of the lock protocol between supervisors, operators and the server.

`want` is the complete state of one supervisor: it is sent first on every connection and again at
every change, and whatever it no longer names is over. `granted` is the server's answer, sent to the
holder and to every other supervisor, which is how a supervisor learns that it has lost a lock.
There is no release and no acknowledgement: both follow from these two.

A gateway is no supervisor: it sends `borrow`, never waits for a lock and never holds one. It is
lent the listening socket and told who holds the lock, or why no engine does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.wire.messages import Catalogue, Message, messages_in

TOKEN_CLAIMED_MAX = 2**62  # leaves room above any claim, so that a bogus one cannot exhaust tokens
REASON_CHARS_MAX = 512
SWITCHOVER_MS_MAX = 24 * 3_600_000  # a long drain is a matter of hours at most
CONTINUATION_CHARS_MAX = 128  # a digest and a version; compared, never interpreted
NO_ERA = "0" * 16  # of a server that knows no eras

Token = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Claimed = Annotated[int, Meta(ge=0, le=TOKEN_CLAIMED_MAX)]
LockName = Annotated[str, Meta(min_length=1, max_length=32)]
EngineId = Annotated[str, Meta(min_length=1, max_length=63)]
IncarnationId = Annotated[str, Meta(min_length=18, max_length=80)]  # "<engine>-<16 hex>"
HexId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class WantMsg(Message, frozen=True, tag="want"):
    """Supervisor → server: what this supervisor is and wants, in full.

    `incarnation` is None between two launches; what was named before has then been reaped. Its
    witness has its name. `lock`: of its model. `is_wanted`: it waits for the lock, or holds it.
    `token`: under which it believes that it holds it; 0 if it does not. `continuation`: the id of
    what this incarnation would continue streams with (`plumbing.gateway_protocol.Hello`); "" if it
    cannot, as without a gateway. `over`: the token under which this incarnation has handed the lock
    over in place, or 0: no process of it accepts or maps KV memory under that token, ever again.
    Said for the rest of its life, also while it waits for the lock anew.
    `is_leaving`: this supervisor was told to end. It keeps what it holds and is granted nothing.
    `succeeds`: the token of a holder that was told to end, as this supervisor has heard, while
    itself it was not; 0 if there is none.
    """

    supervisor: Annotated[str, Meta(min_length=16, max_length=16)]
    engine: EngineId
    incarnation: IncarnationId | None
    lock: LockName
    is_wanted: bool = False
    token: Claimed = 0
    # A counter shared with `beat` that grows with each message. It orders messages of several
    # connections, and over TCP the sender knows when the message that is answered was sent.
    progress: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    continuation: Annotated[str, Meta(max_length=CONTINUATION_CHARS_MAX)] = ""
    over: Claimed = 0
    is_leaving: bool = False
    succeeds: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class GrantedMsg(Message, frozen=True, tag="granted"):
    """Server → every supervisor, gateway and observer: `incarnation` of `engine` holds `lock`.

    Sent at a grant, and again with the same token when a restarted server has found its holder.
    Tokens grow within an `era`, which changes when a server has lost all of its state: a grant of
    another era replaces whatever was known, and an older token of the same era is never believed.
    `is_leaving`: the holder was told to end; sent again when the server learns that.
    """

    lock: LockName
    engine: EngineId
    incarnation: IncarnationId
    token: Token
    era: HexId = NO_ERA
    is_leaving: bool = False


class StandbyMsg(Message, frozen=True, tag="standby"):
    """Server → holder, after the grant and at every change: whether another engine waits for `lock`
    that could be granted it at once. To a holder that was never sent this, or has lost the server,
    there is none.

    `continues`: the engine that is next can continue the holder's streams, since it has the same
    continuation id. `is_settled`: the server knows that the holder was told to end, and so does the
    engine that is next, which was not told to end itself; or there is none."""

    lock: LockName
    incarnation: IncarnationId  # the holder's, so that a late message is recognised
    is_ready: bool
    continues: bool = False
    is_settled: bool = False


class BeatMsg(Message, frozen=True, tag="beat"):
    """Supervisor → server, every heartbeat: a counter that grows while it works."""

    progress: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Stage(StrEnum):
    """How far a gateway is with the listening descriptor, by its own words."""

    ASKS = "asks"  # it has none and is ready to accept
    ACCEPTS = "accepts"
    YIELDS = "yields"  # it has let go of it for another gateway, and can take it again
    ENDS = "ends"  # it accepts nothing any more


class BorrowMsg(Message, frozen=True, tag="borrow"):
    """Gateway → server: how far this gateway is with the listening socket, and tell it who holds
    `active`, of every model.

    First on its connection, and again at each change. A gateway that accepts hands a copy of the
    socket back with its first message: a restarted server may have none. `started_ms`: when the
    gateway began, by this machine's monotonic clock; the newest one has the socket.
    """

    FDS = (0, 1)
    gateway: HexId
    stage: Stage
    started_ms: Annotated[float, Meta(ge=0)] = 0.0


class ServiceMsg(Message, frozen=True, tag="service"):
    """Server → gateway: the listening socket, lent with one fd: accept from it now.
    Server → supervisor: the address at which clients connect, without an fd."""

    FDS = (0, 1)
    address: str


class YieldMsg(Message, frozen=True, tag="yield"):
    """Server → gateway: another gateway asks for the listening socket. Stop accepting, close what
    only one gateway can have, then say `Stage.YIELDS` and finish the requests."""


class IdleMsg(Message, frozen=True, tag="idle"):
    """Server → gateway: no engine is known to serve under `lock` now, and why; again when the
    reason changes. It proves nothing about the last holder: only a newer grant does.

    `is_final`: every engine was told to end. A holder that still serves finishes what it has."""

    lock: LockName
    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
    is_final: bool = False


class RenewedMsg(Message, frozen=True, tag="renewed"):
    """Server → supervisor, over TCP, for every `want` and `beat`: its lease restarts from when the
    message that carried `progress` was **sent**, which the supervisor knows by its own clock.

    `lease_ms`: how long, plus a margin, the server waits before it takes the engine for dead.
    """

    progress: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    lease_ms: Annotated[int, Meta(ge=1, le=3_600_000)]


class SwitchOverMsg(Message, frozen=True, tag="switch_over"):
    """Operator → server: have the holder of `lock` hand it over to `to` (None: any standby).

    `drain`: it finishes its requests, even where the next engine could continue them.
    """

    lock: LockName
    to: EngineId | None
    timeout_ms: Annotated[int, Meta(ge=1, le=SWITCHOVER_MS_MAX)]
    drain: bool = False


class SwitchedOverMsg(Message, frozen=True, tag="switched_over"):
    """Server → operator: `engine` holds the lock now; a refusal is an error instead."""

    lock: LockName
    source: EngineId
    engine: EngineId
    token: Token
    took_ms: Annotated[int, Meta(ge=0, le=SWITCHOVER_MS_MAX)]


class HandOverMsg(Message, frozen=True, tag="hand_over"):
    """Server → holder: finish your requests, reap, release `lock`, come back as a standby.

    `resume`: streams that can be continued are not finished but closed: `to` continues them.
    """

    lock: LockName
    incarnation: IncarnationId
    to: EngineId
    resume: bool = False


CATALOGUE = Catalogue(*messages_in(globals()))
