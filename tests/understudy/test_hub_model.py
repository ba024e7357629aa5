"""Models of the Hugging Face Hub, from a Hub on this machine: what is downloaded, how it fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from plumbing.errors import UnderstudyError
from tests.e2e.processes import free_offset
from tests.helpers import until
from tests.understudy.hub import COMMIT, Hub, serving
from understudy.pod.table import LocalPod, program
from understudy.up.models import hub_directory
from understudy.up.pods import prepare_local

TINY = "acme/tiny"
SMALL = {"config.json", "tokenizer.json", "chat_template.jinja"}
OTHERS = {"pytorch_model.bin", "onnx/model.onnx", "original/consolidated.00.pth"}
# Each its own content: the cache has equal files once.
FILES = {name: name.encode() for name in (*SMALL, "model.safetensors", *OTHERS)}
EXIT_S = 60.0  # a starting Python on a busy machine

silent = list[str]().append


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, an empty cache, and a package called vllm, since nothing is downloaded without one."""
    (tmp_path / "lib/vllm").mkdir(parents=True)
    (tmp_path / "lib/vllm/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=":")
    repositories = {
        TINY: FILES,
        "acme/old": {"old.bin": b"w"},
    }
    with serving(Hub({**repositories})) as found:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "VLLM_USE_MODELSCOPE"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
            monkeypatch.setenv(name, "60")  # the library's 10 s pass on a busy machine
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield found


def test_download_has_only_what_vllm_loads_and_a_warm_cache_needs_no_network(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: safetensors and no other format; then nothing again, with HF_HUB_OFFLINE and without,
    while the Hub is away. Method: what the Hub was asked for; also for a model without any."""
    assert sorted(path.name for path in located("acme/old", ()).iterdir()) == ["old.bin"]
    hub.downloads.clear()
    directory = located(TINY, ())
    assert directory == tmp_path / f"hf/hub/models--acme--tiny/snapshots/{COMMIT}"
    assert sorted(hub.downloads) == sorted({*SMALL, "model.safetensors"})
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.downloads.clear()
    assert located(TINY, ()) == directory
    hub.status = 503
    assert located(TINY, ()) == directory
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert located(TINY, ()) == directory
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard; nothing listens
    assert located(TINY, ()) == directory
    assert hub.downloads == []


def test_flags_of_vllm_say_which_revision_where_to_and_by_whose_token(hub: Hub, tmp_path: Path):
    """Goal: --revision, --download-dir, --hf-token and --load-format mean what vLLM means."""
    flags = [f"--download_dir={tmp_path}/there", f"--revision={COMMIT}", "--hf-token", "hf_secret"]
    directory = located(TINY, [*flags, "--load-format", "npcache"])
    assert directory.is_relative_to(tmp_path / "there")
    assert "pytorch_model.bin" in hub.downloads
    assert "model.safetensors" not in hub.downloads
    assert "Bearer hf_secret" in hub.tokens


@pytest.mark.parametrize("status", [401, 503])
def test_hub_that_does_not_give_the_model_is_a_sentence(hub: Hub, status: int):
    hub.status = status
    with pytest.raises(UnderstudyError) as refused:
        located(TINY, ())
    assert refused.value.code == "hub.failed"
    assert TINY in refused.value.message
    assert "set HF_TOKEN" in refused.value.message.replace("\n", " ")


def test_both_engines_get_one_directory_and_clients_the_id(hub: Hub, tmp_path: Path):
    """Goal: as `vllm serve`: the model is called what the user called it, unless the user names it;
    the engines never ask the Hub for it."""
    said: list[str] = []
    pod = LocalPod(Path(), None, backend="vllm", hub_id=TINY, backend_args=("--enforce-eager",))
    prepared = asyncio.run(prepare_local(pod, tmp_path / "pod", said.append, True))
    snapshot = str(tmp_path / f"hf/hub/models--acme--tiny/snapshots/{COMMIT}")
    told = [
        each.command[each.command.index("--") + 1 :]
        for each in prepared.containers
        if each.name.startswith("engine-")
    ]
    assert told == [(snapshot, "--served-model-name", TINY, "--enforce-eager")] * 2
    assert [line for line in said if TINY in line and snapshot in line]
    pod = LocalPod(
        Path(), None, backend="vllm", hub_id=TINY, backend_args=("--served-model-name", "mine")
    )
    prepared = asyncio.run(prepare_local(pod, tmp_path / "pod", silent, True))
    command = prepared.containers[-1].command
    assert command[command.index(snapshot) + 1 :] == ("--served-model-name", "mine")


@pytest.mark.parametrize("command", ["up", "drill"])
def test_ctrl_c_ends_a_download(hub: Hub, tmp_path: Path, command: str):
    """Goal: code 130 and no trace at once, and no process goes on; the next start finishes it.
    Method: SIGINT to all processes of the terminal while the weights arrive."""
    hub.block = frozenset({"model.safetensors"})
    started = subprocess.Popen(
        _command(command, tmp_path, TINY),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with started:
        assert hub.begun.wait(EXIT_S)
        (child,) = psutil.Process(started.pid).children()
        os.killpg(started.pid, signal.SIGINT)
        output, errors = started.communicate(timeout=EXIT_S)
    assert started.returncode == 130
    assert "Traceback" not in output + errors
    until(lambda: not child.is_running(), "the download's process to end")


def located(model: str, flags: Sequence[str]) -> Path:
    return asyncio.run(hub_directory(model, flags))


def _command(command: str, directory: Path, model: str) -> list[str]:
    ours = [f"--dir={directory}/pod", f"--port-offset={free_offset()}"] if command == "up" else []
    return [*program("understudy"), command, "--backend=vllm", f"--model={model}", *ours]
