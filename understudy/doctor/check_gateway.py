"""Checks of the gateway and its engines: whether there is one where there must be, and its needs.

Pure. In gateway mode clients reach engines through it alone, so a pod without one answers nobody;
in direct mode the lock server refuses one. The lock server says which mode it is.
"""

from __future__ import annotations

from plumbing.part.paths import GATEWAY_SOCKET, HTTP_SUFFIX
from understudy.doctor.facts import PodFacts
from understudy.doctor.findings import Finding, HealthCheck, failed, passed, skipped, warned
from understudy.status.gateway_view import is_direct, is_open, needs_gateway, served_in_silence

NO_POD = "no lock server answers, so the mode is not known"
DIRECT = "the lock server is in direct mode: engines accept connections themselves"
START = "start it: `gateway serve` with the same --dir; or start the lock server with --direct"


def gateway(facts: PodFacts) -> Finding:
    """Clients reach the engines through it alone."""
    found = facts.view.get("gateway")
    mode = is_direct(facts.view["lockserver"])
    if mode is None and found is None:
        return skipped(NO_POD)
    if found is None and not mode and not needs_gateway(facts.view["lockserver"]):
        return skipped("the lock server has no service address, so there are no requests")
    if mode:
        if found is not None and "error" not in found:
            return failed(
                "a gateway runs beside a lock server in direct mode, which lends it no socket",
                "stop the gateway, or start the lock server without --direct",
            )
        return skipped(DIRECT)
    if found is None or "error" in found:
        why = f": {found['error']}" if found else ""
        if served_in_silence(facts.view["lockserver"]):
            return failed(
                f"the gateway is silent, so no takeover reaches it; its child serves{why}",
                "resume or kill it: `lockserver status` has the command",
            )
        return failed(f"no gateway answers, so requests get a 503{why}", START)
    if not is_open(found):
        why = "; ".join(found.get("problems") or ()) or "it does not say why"
        return failed(f"the gateway does not accept connections: {why}", "see `gateway status`")
    return passed("it accepts connections")


def one_gateway(facts: PodFacts) -> Finding:
    """Two would take turns at the same port, and only one of them can be asked."""
    found = [each for each in facts.listeners if each.name == GATEWAY_SOCKET]
    if len(found) > 1:
        who = ", ".join(str(each.process or "a process not visible here") for each in found)
        return failed(
            f"{len(found)} gateways listen on {facts.directory.path}/{GATEWAY_SOCKET}: {who}",
            "stop all of them, then start one; new requests wait meanwhile",
        )
    borrowers = facts.view["lockserver"].get("gateways") or ()
    if len(borrowers) > 1:
        pids = ", ".join(str(each.get("pid") or "not visible here") for each in borrowers)
        return warned(
            f"the lock server has lent its socket to {len(borrowers)} gateways: pids {pids}",
            "stop the one that is too many, unless one replaces the other just now",
        )
    if found:
        return passed(str(found[0].process or "a process not visible here"))
    return skipped("no gateway is running on this directory")


def private_sockets(facts: PodFacts) -> Finding:
    """Whoever connects to one can set the headers of the private hop."""
    found = [each for each in facts.sockets if each.name.endswith(HTTP_SUFFIX)]
    mode = is_direct(facts.view["lockserver"])
    if not found:
        return skipped(DIRECT if mode else "no engine is active behind a gateway")
    if mode:
        return failed(
            f"{', '.join(each.name for each in found)}: engines serve a gateway, and the lock"
            " server is in direct mode",
            "restart the engines, one after the other: they learn the mode when they connect",
        )
    opened = [each for each in found if each.mode is not None and each.mode & 0o077]
    if opened:
        return failed(
            "; ".join(f"{each.name} has mode {each.mode or 0:04o}" for each in opened),
            f"chmod 600 {' '.join(f'{facts.directory.path}/{each.name}' for each in opened)}",
        )
    return passed(f"{', '.join(each.name for each in found)}: private")


def engines(facts: PodFacts) -> Finding:
    """What they say of themselves: settings that cost something, or a self-test that failed."""
    answered = [each for each in facts.view["engines"] if "error" not in each]
    if not answered:
        return skipped("no engine answers")
    found = [
        f"{each['engine']['id']}: {problem}"
        for each in answered
        for problem in each.get("problems") or ()
    ]
    if found:
        return warned("; ".join(found), "see `engine status`")
    return passed("no engine reports a problem")


def tls_files(facts: PodFacts) -> Finding:
    """The gateway reads them when a child starts, so a bad one is found at the worst moment."""
    if not facts.tls_files:
        return skipped("this environment names no certificate")
    bad = [each for each in facts.tls_files if each.problem is not None]
    if bad:
        return failed(
            "; ".join(f"{each.variable} is {each.path}: {each.problem}" for each in bad),
            "make the file readable for the pod's user, and its key private to that user",
        )
    return passed(", ".join(each.path for each in facts.tls_files))


CHECKS = (
    HealthCheck("gateway", "gateway", gateway),
    HealthCheck("one_gateway", "single gateway", one_gateway),
    HealthCheck("private_sockets", "engines' private sockets", private_sockets),
    HealthCheck("engines", "engines' own reports", engines),
    HealthCheck("tls_files", "TLS files", tls_files),
)
