"""What the documents name exists."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from engine.backends.vllm import versions
from engine.backends.vllm.api.arguments import OURS, OWNED, OWNED_VARIABLES

ROOT = pathlib.Path(__file__).parent.parent
VLLM = (ROOT / "docs/vllm.md").read_text()


@pytest.mark.parametrize(("page", "letter"), [("memory", "M"), ("kv", "K")])
def test_every_invariant_names_tests_that_exist(page, letter):
    """Each row has its number in order, and tests that are there."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    text = (ROOT / f"docs/{page}.md").read_text()
    rows = re.findall(rf"^\| {letter}(\d+) \|(.*)$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 12
    for number, row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"{letter}{number} names no test"
        assert set(named) <= defined, f"{letter}{number} names {set(named) - defined}"


def test_every_promise_of_the_lock_is_in_the_contract():
    """docs/lock.md numbers the promises in order; docs/contract.md names tests for each number."""
    page = (ROOT / "docs/lock.md").read_text()
    contract = (ROOT / "docs/contract.md").read_text()
    promises = page.partition("\n## Promises\n")[2].partition("\n## ")[0]
    numbers = [int(each) for each in re.findall(r"^### (\d+)\. ", promises, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    section = contract.partition("\n## The lock\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d, ]+): ", section, re.MULTILINE)
    assert sorted(int(each) for row in rows for each in row.split(",")) == numbers


def test_every_promise_of_the_contract_names_tests_that_exist():
    """docs/contract.md: each row names a test, and every test that the page names is there."""
    page = (ROOT / "docs/contract.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(|^(test_\w+) = ", sources, re.MULTILINE))
    names = {name for pair in defined for name in pair}
    assert set(re.findall(r"`(test_\w+)`", page)) - names == set()
    rows = re.findall(r"^\| (?!promise)(?!-)(.*)$", page.replace("|---|---|\n", ""), re.MULTILINE)
    assert len(rows) >= 30
    unnamed = [row for row in rows if "`test_" not in row and "each rename" not in row]
    assert unnamed == []


def test_every_flag_that_vllm_users_meet_is_in_its_page():
    """docs/vllm.md: what is refused and what is ours, each with its flag; the variables, too."""
    flags = ["--" + name.replace("_", "-") for name in OWNED]
    missing = [word for word in (*flags, *OURS, *OWNED_VARIABLES) if f"`{word}" not in VLLM]
    assert missing == []


def test_error_codes_versions_and_files_of_the_vllm_page_exist():
    """docs/vllm.md: every code in its table is in the sources; so are the versions and files."""
    rows = "\n".join(line for line in VLLM.splitlines() if line.startswith("| `"))
    codes = set(re.findall(r"`((?:vllm|engine|gms|model)\.\w+)`", rows))
    assert len(codes) >= 8
    sources = "\n".join(
        path.read_text() for package in ("engine", "gms") for path in (ROOT / package).rglob("*.py")
    )
    assert {code for code in codes if f'"{code}"' not in sources} == set()
    assert versions.supported_range() in VLLM
    for name in re.findall(r"`((?:requirements|hack)/[\w./-]+)`", VLLM):
        assert (ROOT / name).exists(), name


def test_the_files_of_the_journeys_exist():
    """docs/architecture.md lists them with the shell's braces, and their number before the list."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("\n## Three journeys\n")[2].partition("\n## ")[0]
    lists = re.findall(r"\((\d+)[^)]*\):\n\n```\n(.*?)\n```", section, re.DOTALL)
    assert len(lists) == 3
    for number, block in lists:
        braces = ",".join(re.sub(r"^\w*\s+", "", line) for line in block.splitlines())
        command = f"printf '%s.py\\n' {{{braces.replace(' ', '')}}}"
        files = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert len(set(files.stdout.split())) == int(number)
        assert [name for name in files.stdout.split() if not (ROOT / name).exists()] == []


def test_links_between_documents_lead_somewhere():
    """README and docs: every link to a file, and to a heading of a page, has one."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
            found = (page.parent / target) if target else page
            assert found.exists(), f"{page.name} links to {target}"
            if anchor and found.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
                anchors = {
                    re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
                }
                assert anchor in anchors, f"{page.name} links to {target}#{anchor}"
