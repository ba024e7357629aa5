"""Goal: what the container files say is what the manifests expect of an image.

Method: the files as text, also the one that is built nowhere here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests.deploy.manifests import DEPLOY, PODS, ROOT, pod_spec

CONTAINERFILES = {
    path.name: path.read_text() for path in sorted((DEPLOY / "container").glob("Containerfile.*"))
}
EXTRAS = {"Containerfile.cpu": (), "Containerfile.cuda": ("cuda", "vllm")}


@pytest.mark.parametrize("text", CONTAINERFILES.values(), ids=CONTAINERFILES)
def test_image_has_no_entry_point_and_is_the_pods_user(text: str):
    """The manifests say `command`, and which user all containers of a pod are."""
    assert not re.search(r"^(ENTRYPOINT|VOLUME|EXPOSE)", text, re.MULTILINE)
    for overlay in PODS:
        security = pod_spec(overlay)["securityContext"]
        assert f"USER {security['runAsUser']}:{security['runAsGroup']}\n" in text
        assert f"--uid {security['runAsUser']} " in text


@pytest.mark.parametrize("text", CONTAINERFILES.values(), ids=CONTAINERFILES)
def test_image_has_every_package_of_ours(text: str):
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == {"plumbing", "lockserver", "gms", "engine", "gateway", "pool", "understudy"}


@pytest.mark.parametrize(("name", "text"), CONTAINERFILES.items(), ids=CONTAINERFILES)
def test_image_gets_what_the_project_depends_on(name: str, text: str):
    """The program in the file, run here on the same pyproject.toml."""
    (program,) = re.findall(r"^RUN python3 -c '(.*?)' > ", text, re.MULTILINE | re.DOTALL)
    program = program.replace("\\\n", "")  # as the build joins lines
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for extra in EXTRAS[name] for each in project["optional-dependencies"][extra]]
    assert said.stdout.splitlines() == [*project["dependencies"], *extras]
