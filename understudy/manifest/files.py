"""The files of a manifest's pod: the manifest itself, and its volumes.

Owns reading: a file that is rendered already, or a directory of Kustomize, for which it asks
`kubectl`, or takes what was rendered from one of ours. And owns making volumes: a new pod has empty
ones, as in Kubernetes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

from plumbing.errors import UsageError
from understudy.manifest.read import Document, read_manifest
from understudy.manifest.spec import Manifest
from understudy.manifest.values import Choices

KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")
RENDER_DEADLINE_S = 60.0  # it takes a tenth of a second, and longer where a base is fetched
MANIFEST_MAX_BYTES = 4 * 2**20  # what etcd takes of one object is 1.5 MiB; ours have 20 KiB


async def load_manifest(path: Path) -> Manifest:
    """The pod that `path` describes.

    Raises:
        UsageError: it cannot be read, rendered or understood.
    """
    if not path.is_dir():
        return read_manifest_file(path)
    return read_manifest(_documents(path, await _render(path)))


def read_manifest_file(path: Path) -> Manifest:
    """The pod that the rendered file `path` describes.

    Raises:
        UsageError: it cannot be read or understood.
    """
    return read_manifest(_documents(path, _read(path)))


def make_volumes(manifest: Manifest, volumes: Mapping[str, Path], choices: Choices) -> None:
    """Make the pod's own volumes anew, and check that the others are there.

    Raises:
        UsageError: `manifest.no_volume`, a directory that was named does not exist, or one of the
            pod's cannot be made.
    """
    for name, path in volumes.items():
        volume = manifest.volumes[name]
        if name in choices.volume or not volume.is_of_pod:
            if not path.exists():
                raise UsageError(
                    "manifest.no_volume",
                    f"volume {name} is {path}, which does not exist; name another with "
                    f"--set volume.{name}=PATH",
                )
            continue
        data = manifest.config_maps.get(volume.source, {}) if volume.kind == "configMap" else {}
        try:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(mode=0o700, parents=True)
            for key, value in data.items():
                (path / key).write_text(choices.config.get(key, value), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                "manifest.no_volume",
                f"volume {name} cannot be made anew at {path}: {error.strerror}; remove what is "
                "there, or name another directory with --dir",
            ) from error


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MANIFEST_MAX_BYTES:
            raise UsageError(
                "manifest.too_long",
                f"{path} has more than {MANIFEST_MAX_BYTES} bytes; name a pod's manifest",
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            "manifest.unreadable", f"cannot read the manifest {path}: {reason}", path=str(path)
        ) from error


async def _render(directory: Path) -> str:
    if not any((directory / name).exists() for name in KUSTOMIZATIONS):
        raise UsageError(
            "manifest.no_kustomization",
            f"{directory} has no {KUSTOMIZATIONS[0]}; name such a directory, or a rendered file",
        )
    kubectl = shutil.which("kubectl")
    rendered = directory.absolute().parent.parent / "rendered" / f"{directory.absolute().name}.yaml"
    if kubectl is not None:
        return await _ask_kubectl(kubectl, directory)
    if rendered.exists():
        return _read(rendered)
    raise UsageError(
        "manifest.no_kubectl",
        f"{directory} is to be rendered, and there is no kubectl; install it, or name a file that "
        "`kubectl kustomize` has written",
    )


async def _ask_kubectl(kubectl: str, directory: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        kubectl,
        "kustomize",
        str(directory),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RENDER_DEADLINE_S):
            text, said = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise UsageError(
            "manifest.not_rendered",
            f"`kubectl kustomize {directory}` did not end within {RENDER_DEADLINE_S:g} s; name a "
            "rendered file",
        ) from error
    if process.returncode:
        why = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError("manifest.not_rendered", f"`kubectl kustomize {directory}`: {why}")
    return text.decode()


def _documents(path: Path, text: str) -> list[Document]:
    # A pod that is started from flags need not carry the parser.
    from understudy.manifest.strict_yaml import NotYamlError, load_all

    try:
        found = [each for each in load_all(text) if each is not None]
    except NotYamlError as error:
        raise UsageError("manifest.broken", f"{path} is not YAML: {error}") from error
    if not all(isinstance(each, dict) for each in found):
        raise UsageError("manifest.broken", f"{path} has a document that is no mapping")
    return found
