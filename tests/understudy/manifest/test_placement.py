"""A manifest's pod on this machine: its values, paths, ports, and what `--set` changes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbing.errors import UsageError
from tests.deploy.manifests import documents
from tests.understudy.manifest.test_read import small
from understudy.kubelet.containers import KUBELET, Container
from understudy.manifest.placement import (
    Placement,
    ignored_parts,
    needs_model,
    place_containers,
    place_ports,
    place_volumes,
    runtime_directory,
)
from understudy.manifest.read import read_manifest
from understudy.manifest.spec import PodManifest
from understudy.manifest.values import (
    Choices,
    expand,
    pod_fields,
    read_choice,
    replace_paths,
    replace_ports,
)

HOME = Path("/run/pod")


def place(manifest: PodManifest, *chosen: str, first: int | None = None, **more) -> list[Container]:
    """The manifest's containers in `HOME`, with `--set` for each of `chosen`."""
    choices = Choices.of(read_choice(each) for each in chosen)
    where = Placement(
        place_volumes(manifest, HOME, choices),
        place_ports(manifest, choices, first),
        pod_fields(manifest, "the-uid", "the-node"),
        choices,
        **more,
    )
    return place_containers(manifest, where, lambda name: (f"/bin/{name}",))


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x=$(A),$(B)!", "x=1,two!"),
        ("$(NOBODY)", "$(NOBODY)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $( A )", "$A ${A} $( A )"),
        ("100$", "100$"),
        ("$(A", "$(A"),
        ("$(C)", "$(A)"),  # a value is not looked at again
    ],
)
def test_references_are_those_of_the_kubelet(text: str, expanded: str):
    """Goal: `$(NAME)` to the letter. Method: the table."""
    assert expand(text, {"A": "1", "B": "two", "C": "$(A)"}) == expanded


def test_environment_is_built_in_the_kubelets_order():
    """Goal: ConfigMaps first, then one by one, each knowing those before. Method: all sources."""
    manifest = small(
        """
        envFrom:
        - {configMapRef: {name: settings}, prefix: S_}
        - {configMapRef: {name: absent, optional: true}}
        env:
        - {name: EARLY, value: "$(LATE)"}
        - {name: LATE, value: "$(S_MODEL)-x"}
        - {name: S_SIZE, value: "9"}
        - {name: KEY, valueFrom: {configMapKeyRef: {name: settings, key: MODEL}}}
        - {name: NONE, valueFrom: {configMapKeyRef: {name: settings, key: X, optional: true}}}
        - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: APP, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}}
        - {name: WHAT, valueFrom: {fieldRef: {fieldPath: "metadata.labels['what']"}}}
        - {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}
        """
    )
    manifest.config_maps["settings"] = {"MODEL": "llama", "SIZE": "1"}  # type: ignore[index] # a dict
    (container,) = place(manifest)
    assert container.env == {
        "S_MODEL": "llama",
        "S_SIZE": "9",
        "EARLY": "$(LATE)",
        "LATE": "llama-x",
        "KEY": "llama",
        "POD": "small-0",
        "IP": "127.0.0.1",
        "NODE": "the-node",
        "APP": "small",
        "WHAT": "",
    }


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("envFrom: [{configMapRef: {name: gone}}]", "from ConfigMap gone"),
        (
            "env: [{name: X, valueFrom: {configMapKeyRef: {name: gone, key: k}}}]",
            "takes X from k of ConfigMap gone",
        ),
        ("env: [{name: X, valueFrom: {fieldRef: {fieldPath: spec.x}}}]", "from field spec.x"),
    ],
)
def test_value_that_is_not_there_is_named(env: str, words: str):
    """Goal: the way out in the sentence. Method: each source, absent."""
    with pytest.raises(UsageError, match=words + r".*--set env\.NAME=VALUE") as caught:
        place(small(env))
    assert caught.value.code == "manifest.no_value"


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("/model", "/srv/m"),
        ("/model/tiny", "/srv/m/tiny"),
        ("--model=/model", "--model=/srv/m"),
        ("/models", "/models"),
        ("see /model", "see /model"),
        ("/model/deep", "/srv/deep"),
        ("/model/deep/x", "/srv/deep/x"),
        ("A=/tmp", "A=/v/tmp"),
        ("/x/tmp", "/x/tmp"),
    ],
)
def test_paths_of_volumes_are_replaced_where_a_word_begins_with_them(text: str, moved: str):
    """Goal: no other text is touched, the longest path wins. Method: the table."""
    places = {"/model": "/srv/m", "/model/deep": "/srv/deep", "/tmp": "/v/tmp"}
    assert replace_paths(text, places) == moved


def test_ports_are_replaced_where_they_are_ports():
    """Goal: nothing else that is the same number. Method: each way to write one."""
    words = ("--service=active=0.0.0.0:8000", "--http-port=8000", "--bytes=8000", "8000", "x:8001")
    assert replace_ports(words, {8000: 15000}) == (
        "--service=active=0.0.0.0:15000",
        "--http-port=15000",
        "--bytes=8000",
        "8000",
        "x:8001",
    )


def test_cpu_overlay_in_another_place_is_told_of_its_directories_and_ports():
    """Goal: two pods on one machine. Method: the overlay with a model and ports of its own."""
    manifest = read_manifest(documents("cpu"))
    pod = place(manifest, "volume.model=/srv/m", first=15_000)
    lock, _, gateway, model, one, two = pod
    assert model.command == ("/bin/python3", *model.command[1:-1], "/srv/m")
    assert "--service=active=0.0.0.0:15000" in lock.command
    assert lock.command[0] == "/bin/lockserver"
    ports = [each.env["UNDERSTUDY_HTTP_PORT"] for each in pod if each is not model]
    assert ports == ["15001", "15002", "15003", "15004", "15005"]
    assert gateway.command[0] == "/bin/gateway"
    assert {each.init for each in (lock, gateway, one, two)} == {("/bin/understudy-init",)}
    assert one.startup is not None
    assert one.startup.url == "http://127.0.0.1:15004/startup"
    assert one.liveness is not None
    assert (one.liveness.period_s, one.liveness.grace_s, one.grace_s) == (10, 1, 45)
    assert "--model=/srv/m" in one.command
    assert one.env["MODEL"] == "/srv/m"
    assert two.env["TMPDIR"] == two.env["HOME"] == "/run/pod/vol/tmp-engine-1"
    assert runtime_directory([lock]) == HOME / "vol/shared/understudy"
    assert {each.pace for each in pod} == {KUBELET}
    assert all(each.is_private for each in pod)


def test_no_dra_overlay_is_told_of_its_ports_in_the_words_of_up():
    """Goal: one container with all parts. Method: moved ports, and flags that were set."""
    manifest = read_manifest(documents("no-dra"))
    flags = ("flag.backend=reference", "flag.memory=host", "flag.kv-cache-memory-bytes=")
    (container,) = place(manifest, "volume.model=/srv/m", *flags, first=20_000)
    assert container.command == (
        *("/bin/understudy", "up", "--backend=reference", "--memory=host", "--host=0.0.0.0"),
        *("--model=/srv/m", "--tensor-parallel=1", "--"),
    )
    ports = {name: value for name, value in container.env.items() if name.endswith("_PORT")}
    assert ports == {
        "UNDERSTUDY_SERVICE_PORT": "20000",
        "UNDERSTUDY_LOCKSERVER_PORT": "20001",
        "UNDERSTUDY_GMS_PORT": "20002",
        "UNDERSTUDY_GATEWAY_PORT": "20003",
        "UNDERSTUDY_ENGINE_PORT": "20004",
    }
    assert container.liveness is not None
    assert container.liveness.url == "http://127.0.0.1:20001/live"
    with pytest.raises(UsageError, match="engine-1 must be that of engine-0 plus 1"):
        place(manifest, "volume.model=/srv/m", "port.engine-0=9500")


def test_set_changes_what_it_names():
    """Goal: env, config, port and volume. Method: the overlay, and what becomes of it."""
    manifest = read_manifest(documents("cpu"))
    chosen = ("env.LOG_LEVEL=debug", "config.TENSOR_PARALLEL=2", "port.http=8001")
    pod = place(manifest, "volume.model=/m", "volume.shared=/dev/shm/x", *chosen)
    lock, gms, gateway, _, one, _ = pod
    assert {each.env["LOG_LEVEL"] for each in (lock, gms, gateway, one)} == {"debug"}
    assert "--devices=2" in gms.command
    assert "--tensor-parallel=2" in one.command
    assert "--service=active=0.0.0.0:8001" in lock.command
    assert one.env["UNDERSTUDY_DIR"] == "/dev/shm/x/understudy"


@pytest.mark.parametrize("chosen", ["volume.x=/y", "config.X=1", "port.x=1", "flag.no-such=1"])
def test_set_of_what_is_not_there_is_refused(chosen: str):
    """Goal: a slip of the finger changes nothing in silence. Method: one name nobody has."""
    with pytest.raises(UsageError, match=r"the manifest has no such .*; it has") as caught:
        place(read_manifest(documents("cpu")), "volume.model=/m", chosen)
    assert caught.value.code == "manifest.needless_set"


@pytest.mark.parametrize("text", ["", "x", "port.http", "port.http=x", "port.x=70000", "way.x=1"])
def test_bad_set_is_refused(text: str):
    with pytest.raises(ValueError, match=r"must be one of volume|a port must be"):
        read_choice(text)


def test_volume_that_only_a_cluster_has_must_be_named_or_is_a_random_model():
    """Goal: no guess about somebody's files. Method: the claim of the overlay, with and without."""
    manifest = read_manifest(documents("single-gpu"))
    with pytest.raises(UsageError, match=r"persistentVolumeClaim.*--set volume\.model=PATH"):
        place(manifest)
    assert needs_model(manifest, Choices())
    assert not needs_model(manifest, Choices.of([read_choice("volume.model=/m")]))
    assert not needs_model(small(), Choices())
    assert not needs_model(read_manifest(documents("cpu")), Choices())  # it writes its own


def test_containers_that_cannot_run_here_are_refused():
    """Goal: a sentence before anything starts. Method: no command, a lost port, a lost volume."""
    with pytest.raises(UsageError, match="main has no command"):
        place(small("command: []\nargs: []"))
    with pytest.raises(UsageError, match="uses port 'web', which the container does not declare"):
        place(small("livenessProbe: {httpGet: {port: web}}"))
    with pytest.raises(UsageError, match="mounts volume v"):
        place(small("volumeMounts: [{name: v, mountPath: /v}]"))


def test_namespaces_are_given_unless_the_pod_shares_its_processes():
    """Goal: shareProcessNamespace. Method: both, where namespaces can be had."""
    (alone,) = place(small(), has_pid_namespaces=True)
    (together,) = place(small(pod="shareProcessNamespace: true"), has_pid_namespaces=True)
    assert (alone.has_pid_namespace, together.has_pid_namespace) == (True, False)


def test_what_is_not_honoured_takes_two_lines_at_most():
    """Goal: said once, and readable. Method: our overlay, and a pod that is honoured whole."""
    said = ignored_parts(read_manifest(documents("cpu")))
    assert len(said) == 2
    assert "the volume at /dev/shm" in said[0]
    assert "Service understudy" in said[1]
    assert ignored_parts(small()) == []
