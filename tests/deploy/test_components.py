"""Goal: what users make of the overlays is valid and does what docs/kubernetes.md says.

Method: overlays of a user's own, rendered by kubectl; Kubernetes' schemas; selectors, references.
"""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest

from tests.deploy.manifests import (
    DEPLOY,
    FLEETS,
    IN_ONE_POD,
    NODES,
    OF_PODS,
    OVERLAYS,
    WITH_CLAIM,
    Document,
    block,
    documents,
    labels,
    needs_kubectl,
    one_of,
    pod_spec,
    render,
    using,
)
from tests.deploy.test_manifests import references, selectors

VERSIONS = ["1.34", kubernetes_validate.latest_version()]
OF_CLAIMS = ("exclusive-gpu", "tainted-gpu")


@needs_kubectl
@pytest.mark.parametrize("overlay", WITH_CLAIM)
def test_components_of_claims_change_nothing_else(own: Path, overlay: str):
    """Goal: a GPU of one's own, kept while a drain runs. Method: the rendered claim;
    what is left without the two fields is the overlay."""
    found = render(own, using(overlay, *OF_CLAIMS))
    claim = one_of(found, "ResourceClaimTemplate")
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    (selector,) = request["exactly"].pop("selectors")
    assert "device.allowMultipleAllocations" in selector["cel"]["expression"]
    (toleration,) = request["exactly"].pop("tolerations")
    assert toleration["effect"] == "NoExecute"
    grace = pod_spec("single-gpu")["terminationGracePeriodSeconds"]
    assert toleration["tolerationSeconds"] == grace
    assert sorted(found, key=str) == sorted(documents(overlay), key=str)


def is_published(found: list[Document]) -> bool:
    """Whether the Service that balances requests lists pods that are not ready."""
    services = (each["spec"] for each in found if each["kind"] == "Service")
    (service,) = (each for each in services if each.get("ports", [{}])[0].get("name") == "http")
    return service.get("publishNotReadyAddresses", False) is True


def makers(found: list[Document]) -> list[Document]:
    return [each["spec"] for each in found if each["kind"] in OF_PODS]


@needs_kubectl
@pytest.mark.parametrize("overlay", [each for each in IN_ONE_POD if each not in FLEETS])
def test_replicas_list_only_pods_that_are_ready(own: Path, overlay: str):
    """Goal: requests go to a pod that serves, a pod that ends gets none, and there is no field that
    a cluster refuses. Method: the component on each overlay, with all others that fit; the flag,
    the sleep of each container that drains, the oldest and the newest schema."""
    found = render(own, using(overlay, "replicas", *(OF_CLAIMS if overlay in WITH_CLAIM else ())))
    for document in found:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    assert not is_published(found)
    ((made,), (alone,)) = makers(found), makers(documents(overlay))
    spec, grace = made["template"]["spec"], "terminationGracePeriodSeconds"
    assert made["replicas"] == 2
    sleep = {"preStop": {"sleep": {"seconds": 5}}}
    assert [each["lifecycle"] for each in spec["containers"]] == [sleep] * len(spec["containers"])
    assert spec[grace] == alone["template"]["spec"][grace] + 5
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"] == made["selector"]


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each not in FLEETS])
def test_dead_container_takes_no_pod_out_of_its_service(overlay: str):
    """Goal: a pod that is alone is listed whichever container died, for up to five minutes of the
    kubelet's back-off; no request goes to a pod that loads or ends while another serves. Method:
    the flag against the number of pods; only pods without it wait before they end."""
    found = documents(overlay)
    made = next(
        each
        for each in makers(found)
        if "understudy" in str(each["selector"]) and (overlay != NODES or "serviceName" in each)
    )
    assert is_published(found) == (made["replicas"] == 1) == (overlay != NODES)
    waits = ["lifecycle" in each for each in made["template"]["spec"]["containers"]]
    assert waits == [overlay == NODES] * len(waits)


@needs_kubectl
@pytest.mark.parametrize(
    "overlay", ["cpu", "fleet", "no-dra", "pool", "single-gpu"]
)  # one of each kind
def test_two_instances_share_a_namespace(tmp_path: Path, overlay: str):
    """Goal: neither finds the other's pods or objects. Method: the page's overlay twice, with a
    name of its own; every selector and reference of the one against the objects of both."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    text = block("kubernetes.md", "namePrefix:")
    text = re.sub(r"\[\S*\]", f"[../deploy/overlays/{overlay}]", text, count=1)
    chat, code = (render(tmp_path / name, text.replace("chat", name)) for name in ("chat", "code"))
    mine, theirs = (names(each) for each in (chat, code))
    assert not mine & theirs
    pods, others = (pod_labels(each) for each in (chat, code))
    for document in chat:
        for selector in selectors(document):
            assert any(selector.items() <= each.items() for each in pods), document["kind"]
            assert not [each for each in others if selector.items() <= each.items()]
        if document["kind"] in OF_PODS:
            assert references(document["spec"]["template"]["spec"]) <= mine


def names(found: list[Document]) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in found}


def pod_labels(found: list[Document]) -> list[dict[str, str]]:
    return [own for each in found if each["kind"] in OF_PODS for own in labels(each)]
