"""The rules of a fleet, each left out once."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.core import fleet as fleet_module
from gateway.core.client_request import Attempt
from gateway.core.events import BreakCause, DropAttempt
from gateway.core.fleet import Fleet
from gateway.core.pods import Pod, PodState
from gateway.core.replay_join import Joined
from tests.sim.kit import PlantedRules

RULES = PlantedRules()


@RULES.instead("F3-a-stream-keeps-its-continuation-id", "F3", fleet_module, "can_continue")
def _any_id(real, model, continuation_id):
    return real(model, model.continuation_id)


@RULES.instead("F1-one-attempt-at-a-time", "F1: a request at two pods", Fleet, "handle")
def _keep_attempts(real, fleet, event, now_ms):
    return [each for each in real(fleet, event, now_ms) if not isinstance(each, DropAttempt)]


@RULES.instead(
    "F1-what-was-dropped-is-not-heard", "F1: a dropped attempt speaks", Attempt, "group", seed=63
)
def _hear_dropped(real, attempt, events, tokens, chunks, now_ms):
    return real(attempt, events, tokens, chunks, now_ms) or (events if attempt.is_over else b"")


@RULES.instead("F1-one-incarnation", "F1: another incarnation", Fleet, "head", seed=445)
def _any_incarnation(real, fleet, attempt, came, now_ms):
    signed = came if not came.token else replace(came, token=attempt.token)
    real(fleet, attempt, signed, now_ms)


@RULES.rule("F5-silence-moves-nothing-to-nowhere", "F5")
def _move_to_nowhere(patch):
    real = Fleet._empty

    def empty(fleet, pod, state, now_ms):
        if state is not PodState.SILENT:
            real(fleet, pod, state, now_ms)
            return
        for attempt in list(fleet.attempts.values()):
            if attempt.engine == pod.address and fleet._may_move(attempt.owner, state):
                fleet.broke(attempt, BreakCause.MOVED, now_ms)

    patch.setattr(Fleet, "_empty", empty)


RULES.put(
    "F5-stalls-of-the-front-are-not-silence", "not silent", fleet_module, "STALL_MS", 1e9, seed=1879
)
RULES.put("F6-a-pod-that-kills-is-charged", "F6", Fleet, "_is_dead_of", lambda *_: None)


@RULES.instead("F4-what-is-no-inference-is-sent-once", "F4", Fleet, "add")
def _ask_again(real, fleet, came, now_ms):
    return real(fleet, replace(came, is_inference=True), now_ms)


@RULES.instead(
    "F8-an-incarnation-ends-with-its-streams", "a pod that is gone", Fleet, "_lose", seed=177
)
def _lose_nothing(real, fleet, pod, cause, now_ms):
    return None


@RULES.instead("F8-a-pod-that-leaves-gets-nothing-new", "a pod that leaves", Pod, "state")
def _never_leaving(real, pod, *times_ms):
    found = real(pod, *times_ms)
    return PodState.READY if found is PodState.LEAVING else found


@RULES.rule("F8-those-aside-are-looked-at-again", "F8|F2")
def _forget_aside(patch):
    patch.setattr(fleet_module, "ASIDE_MS", 1e9)
    patch.setattr(Fleet, "_look_at_aside", lambda *_: None)


RULES.put("F2-a-replay-must-be-equal", "F2", Joined, "is_same", lambda *_: True, seed=72)


@RULES.instead("F8-a-pod-without-engine-is-left", "F8", Fleet, "_place_for")
def _stay(real, fleet, request):
    sent = fleet._sent.get(request.number)
    place = real(fleet, request)
    is_other = sent is not None and place is not None and place.pod is not sent.pod
    return None if is_other and not sent.leaves and not sent.pod.is_gone else place
