"""Stand-ins for engines that hand over in place: a real connection over two serving processes."""

from __future__ import annotations

import os

from lockserver import serving, witness
from tests.helpers import auntil, free_witness
from tests.lockserver.engines import Engine
from tests.lockserver.serving_worker import ServingWorker

STEPS = ("serving", "stopped one", "left one", "stopped both", "left both", "said so")


class ServingEngine(Engine):
    """Launches an accepter and a rank instead of backends that only live."""

    def __init__(self, directory: str, engine: str) -> None:
        super().__init__(directory, engine)
        self.workers: list[ServingWorker] = []
        self.over = 0

    def launch(self, *_: object, **__: object) -> str:
        self.incarnation, self.over = witness.new_incarnation(self.client.engine), 0
        path, file = serving.create(self.directory, self.incarnation)
        self.serving_path = path
        self.witness = free_witness(self.directory, self.incarnation)
        used = [os.path.join(self.directory, f"used_{place}") for place in range(2)]
        self.workers = [ServingWorker(self.witness, path, file, each) for each in used]
        return self.incarnation

    def reap(self) -> None:
        for worker in self.workers:
            worker.kill()  # all at once, as a supervisor does
        for worker in self.workers:
            worker.close()
        self.workers.clear()

    async def serve(self) -> int:
        """Wait for the grant and wake; its token."""
        await auntil(self.is_due, f"{self.client.engine} to be granted active")
        token = self.token()
        assert [worker.ask(f"wake {token}") for worker in self.workers] == ["wake", "wake"]
        return token

    def is_due(self) -> bool:
        """Whether it has been granted the lock since it last handed over."""
        return self.token() > self.over

    def rest(self, until: str = "said so") -> None:
        """Hand over in place, up to and including this step."""
        token, (one, other) = self.token(), self.workers
        acts = (
            lambda: None,
            lambda: one.ask("stop"),
            lambda: one.ask("leave"),
            lambda: other.ask("stop"),
            lambda: other.ask("leave"),
            lambda: self.say_over(token),
        )
        done = self.rested
        for number, step in enumerate(STEPS):
            if number >= done:
                self.rested = number + 1
                acts[number]()
            if step == until:
                return

    rested = 0  # steps of the present hand-over that are done

    def say_over(self, token: int) -> None:
        """It waits anew at once."""
        self.over, self.rested = token, 0
        self.want("active")

    def want(self, *locks: str, tokens: dict[str, int] | None = None) -> None:
        self._locks = locks
        over = {"active": self.over} if self.over and self.incarnation else {}
        self.client.set_want(self.incarnation, self.witness, locks, tokens, over=over)

    def _granted(self, lock: str, incarnation: str, token: int) -> None:
        if self.on_granted is not None:
            self.on_granted(lock, incarnation, token)
        self.heard.append((lock, incarnation, token))
        if incarnation == self.incarnation:
            self.want(*self._locks, tokens={lock: token})
