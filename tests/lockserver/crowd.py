"""Many cheap waiters in one process: each has only a witness, a flock and a connection.

Also a program, `python -m tests.lockserver.crowd DIR COUNT`: it prints one line once all waiters
have been answered, and why any were refused. It exits when its stdin is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from lockserver import witness
from lockserver.messages import CATALOGUE, GrantedMsg, WantMsg
from plumbing.errors import RemoteError
from plumbing.service.process import raise_fd_limit
from plumbing.wire.blocking import BlockingClient

ANSWER_S = 60.0


class OneOfMany:
    """One waiter. `join` requests `active`; this process holds the witness while it lives."""

    def __init__(self, directory: str, number: int) -> None:
        self.engine = f"crowd-{number}"
        self.incarnation = witness.new_incarnation(self.engine)
        path, self._fd = witness.create(directory, self.incarnation)
        self.client = BlockingClient(os.path.join(directory, "lockserver.sock"), CATALOGUE)
        name, supervisor = os.path.basename(path), f"{os.getpid():x}-{number}".rjust(16, "0")
        want = WantMsg(supervisor, self.engine, self.incarnation, name, ("active",), {})
        with contextlib.suppress(Exception):  # refused early: `answer` raises
            self.client.notify(want)

    def answer(self) -> GrantedMsg:
        """The next message that names the holder.

        Raises:
            RemoteError: it was refused.
        """
        message = self.client.receive(ANSWER_S).message
        assert isinstance(message, GrantedMsg)
        return message

    def leave(self) -> None:
        self.client.close()
        os.close(self._fd)


def main(directory: str, count: int) -> None:
    raise_fd_limit()
    refused: dict[str, int] = {}
    crowd = [OneOfMany(directory, number) for number in range(count)]
    for each in crowd:
        try:
            each.answer()
        except RemoteError as error:
            refused[error.code] = refused.get(error.code, 0) + 1
    print(json.dumps({"waiting": count - sum(refused.values()), "refused": refused}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
