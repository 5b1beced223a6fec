"""Pages of docs/: code runs as printed, and links have targets."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import gangline
from gangline import spawn
from gangline.collectives.environments.variables import VARIABLES
from tests import printed
from tests.programs import ROOT, product_files

OWN_TESTS = ("collectives.md", "protocol.md")  # their examples are checked in the tests of their subjects
ALL = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [
    page
    for page in ALL
    if page.name not in OWN_TESTS and any(block.language in printed.RUN for block in printed.blocks(page.read_text()))
]
LAUNCHING = [
    page
    for page in PAGES
    if any(
        printed.is_launch(words)
        for block in printed.blocks(page.read_text())
        if block.language == "console"
        for words in printed.commands(block)
    )
]

LONG = {"images", "monitoring", "clusters", "coming-from-mxnet", "devices", "own-network", "backend", "language-models"}
"""Pages whose examples train or start processes."""


def ids(pages: list[Path]) -> list[str]:
    return [page.stem for page in pages]


def run(page: Path, folder: Path, with_launches: bool) -> None:
    [outputs] = spawn(printed.run_page, 1, str(page), str(folder), with_launches, threads=1)
    assert outputs, f"{page} has no block that runs"


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem in LONG else ()) for page in PAGES]
)
def test_a_page_runs_as_printed(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, with_launches=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", LAUNCHING, ids=ids(LAUNCHING))
def test_a_page_runs_as_printed_with_the_jobs_that_it_launches(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, with_launches=True)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_block_either_runs_or_says_that_it_does_not(page: Path) -> None:
    for block in printed.blocks(page.read_text()):
        assert block.language in (*printed.RUN, *printed.SHOWN), f"{page}, line {block.line}: {block.language!r}"


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *ALL], ids=lambda page: page.stem)
def test_linked_files_exist(page: Path) -> None:
    missing = [target for target in printed.links(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


SOURCES = list(product_files("bench", "models", "kvstore", "collectives", "gangline"))


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_and_methods_that_a_page_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    words = {word for block in printed.blocks(text) for word in block.text.split()}
    words |= set(re.findall(r"`([^`\s]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)))
    files = {word for word in words if re.fullmatch(r"[\w.-]+(/[\w.-]+)*\.(py|toml)", word)}
    assert not [file for file in files if not (ROOT / file).is_file()]
    folders = {word for word in words if re.fullmatch(r"([\w-]+/)+", word)} - {"site/", "dist/"}  # are built
    existing = {f"/{source.parent.relative_to(ROOT)}/" for source in SOURCES}
    assert not [folder for folder in folders if not any(one.endswith(f"/{folder}") for one in existing)]
    code: defaultdict[str, str] = defaultdict(str)  # of the files of each class
    for source in (source.read_text() for source in SOURCES):
        for owner in re.findall(r"^class (\w+)", source, re.MULTILINE):
            code[owner] += source
    for owner, method in {tuple(word.split(".")) for word in words if re.fullmatch(r"_?[A-Z][a-z]\w*\.\w+", word)}:
        assert re.search(rf"^    def {method}\(", code[owner], re.MULTILINE), f"{owner}.{method}"
    if name == "docs/architecture.md":
        assert len(files) > 60
        assert len(folders) > 25


def test_error_texts_of_the_troubleshooting_page_occur_in_the_sources() -> None:
    adjacent = re.compile(r"""(["'])\s+[rf]?\1""")  # between the parts of a text that the code writes on several lines
    sources = [adjacent.sub("", source.read_text()) for source in SOURCES]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(headings) >= 20
    for heading in headings:
        fragments = [fragment.strip() for fragment in heading.split("…")]
        assert max(map(len, fragments)) >= 9, heading
        for fragment in fragments:
            assert any(fragment in source for source in sources), f"{heading}: {fragment!r}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason='needs mkdocs: pip install ".[docs]"')
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of mkdocs-material on mkdocs 2
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = "".join(page.read_text() for page in (tmp_path / "site" / "reference").rglob("index.html"))
    anchors = set(re.findall(r'id="gangline\.[\w.]*?(\w+)"', reference))
    assert set(gangline.__all__) - {"callback", "data", "torch_backend", "transfer"} <= anchors  # these are modules


def test_the_page_of_environment_variables_is_complete() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    documented = re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)
    assert len(documented) == len(set(documented))
    ours = re.compile(r"\b(?:GANGLINE|DMLC)_[A-Z_]*[A-Z]\b")
    files = product_files("collectives", "kvstore", "models", "gangline/cli")
    read = {name for file in files for name in ours.findall(file.read_text())}
    assert read == {name for name in documented if ours.match(name)}
    assert {name for name in documented if name.startswith("GANGLINE_")} == VARIABLES
