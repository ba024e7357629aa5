"""`gateway serve --pods`: a front, the process that clients of several pods connect to.

It has no lock server and no engine of its own: it binds its address itself, and pods take the place
of the engine (`gateway.core.fleet`). All else is a gateway's. Fronts share nothing: any number of
them may stand before the same pods, and each keeps the journals of its own clients' streams.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from gateway import schema as doc
from gateway.core.fleet import LOSSES, MOVES, Fleet
from gateway.core.pods import Choice, Pod
from gateway.server.client import listen_at
from gateway.server.exchange import GatewayExchange
from gateway.server.pods import PodLinks
from gateway.server.program import GatewayProgram
from gateway.server.settings import GatewaySettings
from plumbing.service.clock import Clock, moment
from plumbing.service.http import Probe

if TYPE_CHECKING:
    from plumbing.service.metrics import Metrics


class FrontServer(GatewayProgram):
    """One front; see the head of this file."""

    address = ""

    def __init__(self, settings: GatewaySettings, *, clock: Clock | None = None) -> None:
        """Raises:
        UsageError: the names of the pods, or a file, cannot be used.
        """
        super().__init__(settings, clock)
        self.fleet = Fleet(settings.rules)
        self.exchange = GatewayExchange(settings, self.log.record, fleet=self.fleet)
        self.links = PodLinks(settings.pods, settings.fleet_tls, self.fleet, self.exchange)

    async def begin(self) -> list[Coroutine[Any, Any, None]]:
        assert self.settings.listen is not None
        await self.control.start()  # first: it guards the directory
        await self.http.start()
        host, port = self.settings.listen
        fd, port = listen_at(host, port, "--listen")
        self.address = f"{host}:{port}"
        self.exchange.accept(fd)
        self.accepting_ms = self.clock.now_ms()
        self.log.record("gateway.accepting", f"accepts connections on {self.address}")
        return [self.links.run()]

    async def close(self) -> None:
        await self.control.close()
        await self.http.stop()

    def make_metrics(self) -> Metrics:
        from gateway.server.metrics import OfFront

        return OfFront(self.exchange, lambda: self.ready().ok, self.fleet).registered()

    # ------------------------------------------------------------------ status

    def ready(self) -> Probe:
        """It accepts, and has heard a pod: a 503 that says why beats a refused connection."""
        if self.is_stopping:
            return Probe(False, "stopping")
        has_heard = any(pod.report is not None for pod in self.fleet.pods.values())
        reason = "pods" if has_heard else "no_pod"
        return Probe(has_heard, reason, {"waits_for": self.fleet.waits_for or None})

    def status(self) -> doc.FrontStatus:
        fleet = self.fleet
        return doc.FrontStatus(
            **self.common(),
            service=doc.GatewayService(self.address, bool(self.settings.tls_cert)),
            stop=doc.GatewayStop(self.settings.drain_ms, None),
            pods=[self._pod(fleet.pods[each]) for each in sorted(fleet.pods)],
            losses={each: fleet.losses[each] for each in LOSSES},
            moves={each: fleet.moves[each] for each in MOVES},
            choices={str(each): fleet.choices[each] for each in Choice},
        )

    def _pod(self, pod: Pod) -> doc.FrontPod:
        now_ms, report = self.exchange.now_ms(), pod.report
        models = {} if report is None else report.models
        return doc.FrontPod(
            address=pod.address,
            name=None if report is None else report.pod,
            state=str(self.fleet.state(pod)),
            **moment(pod.shown_since_ms, self.clock),
            heard_for_ms=None if report is None else round(now_ms - pod.heard_ms),
            leaving_ms=None if report is None else report.leaving_ms,
            is_named=pod.is_named,
            resumes=now_ms >= pod.suspended_ms,
            streams=sum(each.engine == pod.address for each in self.fleet.attempts.values()),
            models={
                name: doc.FrontPodModel(
                    *(model.engine or None, model.tier, model.in_flight, model.waiting),
                    model.room,
                )
                for name, model in models.items()
            },
            problem=self.links.problems.get(pod.address),
        )

    def problems(self) -> list[str | None]:
        pods = self.fleet.pods
        found = [
            f"{pods[each].name} at {each}: {why}" if each in pods else f"{each}: {why}"
            for each, why in sorted(self.links.problems.items())
        ]
        return [self.fleet.waits_for, self.links.problem, *found]
