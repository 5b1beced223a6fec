"""Fast tests of what a change touches, against the last commit or another one: ``python -m tests.quick [COMMIT]``.

A changed test file runs itself; a changed file of the package runs the test files that import it by its own name, or
whose names hold its name, or else that of its folder; a page of documentation runs the tests of documentation.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "collectives", "gangline", "kvstore", "models")


def changed(commit: str) -> list[Path]:
    """Return the files that differ from a commit, and those that git does not know."""
    found = []
    for words in (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        found += done.stdout.splitlines()
    return [Path(name) for name in dict.fromkeys(found)]


def tests_of(file: Path, texts: dict[Path, str]) -> set[Path]:
    """Return the test files to run for a changed file, given the text of every test file."""
    if file in texts:
        return {file}
    if file.suffix == ".md":
        return {test for test in texts if test.name in ("test_docs.py", "test_readme.py")}
    if file.suffix != ".py" or file.parts[0] not in PACKAGES:
        return set()
    parts = [one for one in file.with_suffix("").parts if one not in ("gangline", "__init__")]
    if len(parts) < 2:  # all tests use the packages themselves
        return set()
    module, folder, name = ".".join(["gangline", *parts]), parts[-2], parts[-1]
    package = module.rpartition(".")[0]
    lines = (f"from {module} import", f"from {package} import {name}\n")
    own = {test for test, text in texts.items() if name in test.stem or any(line in text for line in lines)}
    return own or {test for test in texts if test.stem == f"test_{folder}"}


def main() -> int:
    """Run the tests; return pytest's exit code."""
    texts = {file.relative_to(ROOT): file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = changed(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
    tests = sorted(set().union(*(tests_of(file, texts) for file in files)))
    if not tests:
        print("no test is touched; make test runs all")
        return 0
    print(*tests, sep="\n", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
    return subprocess.run([*command, *map(str, tests)], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
