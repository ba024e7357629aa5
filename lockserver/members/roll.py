"""Which members are known, by their place in an engine and by their connection. Decides nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable

from lockserver.members.events import MemberWanted
from lockserver.members.group import Group, Member
from lockserver.members.leases import Leases


class Roll:
    """A record per member, from its first `want` until it is gone and belongs to nothing."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], Member] = {}
        self._by_conn: dict[int, Member] = {}
        self._nameless: dict[int, float] = {}  # connections without a want: since when

    # ------------------------------------------------------------------ connections

    def opened(self, conn: int, now_ms: float) -> None:
        self._nameless[conn] = now_ms

    def enter(self, want: MemberWanted, now_ms: float) -> tuple[Member, int | None]:
        """The member's record, made to say what its `want` says; the connection it replaces."""
        key = want.engine, want.member
        member = self.known.get(key)
        if member is None or member.supervisor != want.supervisor:
            member = self.known[key] = Member(*key, want.members, want.supervisor, now_ms)
        replaced = member.conn if member.conn != want.conn else None
        if replaced is not None:
            del self._by_conn[replaced]
        self._nameless.pop(want.conn, None)
        member.adopt(want, now_ms)
        self._by_conn[want.conn] = member
        return member, replaced

    def by_conn(self, conn: int) -> Member | None:
        return self._by_conn.get(conn)

    def leave(self, conn: int) -> Member | None:
        """This connection is no more; whose it was."""
        self._nameless.pop(conn, None)
        member = self._by_conn.pop(conn, None)
        if member is not None:
            member.conn = None
        return member

    def late(self, before_ms: float) -> list[int]:
        """Connections that were opened before then and have not said whose they are."""
        return [conn for conn, since_ms in self._nameless.items() if since_ms < before_ms]

    # ------------------------------------------------------------------ members

    def connected(self) -> list[Member]:
        return list(self._by_conn.values())

    def engines(self) -> list[str]:
        return sorted({engine for engine, _ in self.known})

    def at(self, engine: str, count: int) -> list[Member]:
        """The known ones of the first `count` members of an engine, in order."""
        found = (self.known.get((engine, index)) for index in range(count))
        return [member for member in found if member is not None]

    def of(self, group: Group) -> list[Member]:
        return self.at(group.engine, len(group.terms.members))

    def line(self, groups: Iterable[Group], virtual: int) -> list[Member]:
        """The connected members behind a virtual connection, in order."""
        group = next((each for each in groups if each.conn == virtual), None)
        members = [] if group is None else self.of(group)
        return [member for member in members if member.conn is not None]

    def forget(self, leases: Leases, engines: Container[str]) -> None:
        """Drop the members that are gone; those of `engines` are still waited for."""
        for key, member in tuple(self.known.items()):
            is_here = member.conn is not None or leases.of(*key)
            if not is_here and member.engine not in engines:
                del self.known[key]
