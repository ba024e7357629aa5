"""The files of a manifest's pod: what is read, what renders it, what its volumes are made of."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from plumbing.errors import UsageError
from tests.deploy.manifests import DEPLOY, RENDERED
from tests.understudy.manifest.test_read import SMALL, small
from understudy.manifest.files import MANIFEST_MAX_BYTES, load_manifest, make_volumes
from understudy.manifest.placement import place_volumes
from understudy.manifest.values import Choices, read_choice

OF_EACH_KIND = """
volumes:
- {name: empty, emptyDir: {}}
- {name: settings, configMap: {name: settings}}
- {name: model, persistentVolumeClaim: {claimName: model}}
"""


def load(path: Path):
    return asyncio.run(load_manifest(path))


def test_directory_is_what_its_rendered_file_is(monkeypatch: pytest.MonkeyPatch):
    """Goal: an overlay without a kubectl. Method: an empty path, one of ours, a stranger's."""
    rendered = load(RENDERED / "cpu.yaml")
    if shutil.which("kubectl"):
        assert load(DEPLOY / "overlays" / "cpu") == rendered
    monkeypatch.setenv("PATH", "")
    assert load(DEPLOY / "overlays" / "cpu") == rendered
    with pytest.raises(UsageError, match="requires kubectl") as caught:
        load(DEPLOY / "base")
    assert caught.value.code == "manifest.no_kubectl"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, to fail with")
def test_directory_that_does_not_render_is_refused_in_kubectls_words(tmp_path: Path):
    (tmp_path / "kustomization.yaml").write_text("resources: [nowhere.yaml]\n")
    with pytest.raises(UsageError, match=r"kubectl kustomize.*nowhere\.yaml") as caught:
        load(tmp_path)
    assert caught.value.code == "manifest.not_rendered"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [", "is not valid YAML"),
        (b"just words", "not a mapping"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"#" * (MANIFEST_MAX_BYTES + 1), "larger than"),
        (b"a: 2020-99-99", "is not valid YAML: month must be"),
        (b"a: !!int b", "is not valid YAML: invalid literal"),
        (b"a: !!bool b", "is not valid YAML: 'b'"),
        (b"a: !!timestamp b", "is not valid YAML"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"a: 1\nb: {c: 1, d: 2, c: 3}", "duplicate key 'c' at line 2"),
        (b"a: &a [*a]", "must describe one pod"),
    ],
)
def test_file_that_is_no_manifest_is_refused(tmp_path: Path, content: bytes, words: str):
    """Goal: one sentence, whatever it is, and soon. Method: a file of each kind."""
    path = tmp_path / "pod.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load(path)


def test_directory_and_file_that_are_not_there_are_told_apart(tmp_path: Path):
    with pytest.raises(UsageError, match=r"has no kustomization\.yaml"):
        load(tmp_path)
    with pytest.raises(UsageError, match="cannot read the manifest"):
        load(tmp_path / "x.yaml")
    (tmp_path / "pod.yaml").write_text(SMALL)
    assert load(tmp_path / "pod.yaml").name == "small"


def test_new_pod_has_empty_volumes_and_leaves_those_of_others_alone(tmp_path: Path):
    """Goal: an emptyDir begins empty, nobody else's file is touched. Method: a pod twice, with a
    directory of somebody's that looks like one of its own."""
    manifest = small(pod=OF_EACH_KIND)
    manifest.config_maps["settings"] = {"a.conf": "1", "b": "2"}  # type: ignore[index] # a dict
    mine = tmp_path / "vol" / "mine"
    mine.mkdir(parents=True)
    (mine / "weights").write_text("precious")
    chosen = [f"volume.model={mine}", f"volume.empty={mine}", "config.b=3"]
    theirs = Choices.of(read_choice(each) for each in chosen)
    own = Choices.of(read_choice(each) for each in (chosen[0], chosen[2]))
    for choices in (own, theirs, own):
        make_volumes(manifest, place_volumes(manifest, tmp_path, choices), choices)
        settings = tmp_path / "vol" / "settings"
        assert {each.name: each.read_text() for each in settings.iterdir()} == {
            "a.conf": "1",
            "b": "3",
        }
        assert (mine / "weights").read_text() == "precious"
        empty = tmp_path / "vol" / "empty"
        assert list(empty.iterdir()) == []
        if choices is own:
            (empty / "left over").write_text("x")
            make_volumes(manifest, place_volumes(manifest, tmp_path, own), own)
    gone = Choices.of([read_choice(f"volume.model={tmp_path}/gone")])
    with pytest.raises(UsageError, match="which does not exist"):
        make_volumes(manifest, place_volumes(manifest, tmp_path, gone), gone)
