"""Goal: what the container files say is what the manifests expect of an image.

Method: the files as text, also the one that is built nowhere here.
"""

from __future__ import annotations

import re

import pytest

from tests.deploy.manifests import DEPLOY, OVERLAYS, pod_spec

CONTAINERFILES = {
    path.name: path.read_text() for path in sorted((DEPLOY / "container").glob("Containerfile.*"))
}


def test_there_is_one_file_for_each_kind_of_memory():
    assert set(CONTAINERFILES) == {"Containerfile.cpu", "Containerfile.cuda"}


@pytest.mark.parametrize("text", CONTAINERFILES.values(), ids=CONTAINERFILES)
def test_base_is_pinned_and_every_stage_is_made_from_it(text: str):
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    _, _, tag = base.rpartition("/")[2].partition(":")
    assert re.match(r"\d+\.\d+\.\d+-", tag), f"{base} names no release"
    stages = {"${BASE}"}
    for line in re.findall(r"^FROM (.*)$", text, re.MULTILINE):
        source, _, name = line.partition(" AS ")
        assert source in stages
        stages.add(name)


@pytest.mark.parametrize("text", CONTAINERFILES.values(), ids=CONTAINERFILES)
def test_image_has_no_entry_point_and_is_the_pods_user(text: str):
    """The manifests say `command`, and which user all containers of a pod are."""
    assert not re.search(r"^(ENTRYPOINT|VOLUME|EXPOSE)", text, re.MULTILINE)
    for overlay in OVERLAYS:
        security = pod_spec(overlay)["securityContext"]
        assert f"USER {security['runAsUser']}:{security['runAsGroup']}\n" in text
        assert f"--uid {security['runAsUser']} " in text


@pytest.mark.parametrize("text", CONTAINERFILES.values(), ids=CONTAINERFILES)
def test_image_has_every_package_of_ours(text: str):
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == {"lockserver", "gms", "engine", "understudy"}
