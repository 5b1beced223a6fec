"""Test of the tests: small faults put into the product one by one, each of which the fast tests must catch.

``python -m tests.mutants`` applies each fault of mutants.toml to a copy of the checkout and runs the test files that
are named with it, without slow tests; ``python -m tests.mutants WORD ...`` takes the faults whose names hold a word. It
exits with 1 if a fault survives. ``tests/test_mutants.py`` checks that each fault still fits the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
COPIES = 2  # of the checkout, each on a core
SECONDS = 600  # for the tests of one fault


class Mutant(NamedTuple):
    """A fault that some fast test must catch."""

    name: str
    path: str
    """File, from the root of the repository."""
    before: str
    """Text that occurs once in the file."""
    after: str
    tests: str
    """Test files to run, separated by spaces."""

    def applied(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: if the text before does not occur exactly once.
        """
        if text.count(self.before) != 1:
            raise ValueError(
                f"mutant {self.name!r} expects its text once in {self.path}, which has it {text.count(self.before)} "
                f"times: {self.before!r}; write the fault anew for the code of today"
            )
        return text.replace(self.before, self.after)


def mutants() -> list[Mutant]:
    """Read the table."""
    with open(TABLE, "rb") as file:
        return [Mutant(**row) for row in tomllib.load(file)["mutant"]]


class Outcome(NamedTuple):
    """Result of the tests of a mutant."""

    mutant: Mutant
    caught_by: str
    """The first test that failed; empty if none did."""
    seconds: float


def copy_checkout(to: Path) -> None:
    """Copy the files that git knows or does not ignore, with links as links, and the compiled core."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).exists()]
    for name in [*names, *(str(core.relative_to(ROOT)) for core in (ROOT / "gangline").glob("_core*.so"))]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def run_tests(checkout: Path, tests: str) -> tuple[int, str]:
    """Run test files until the first failure; return pytest's exit code and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED the tests ran for more than {SECONDS} s"
    return done.returncode, done.stdout + done.stderr


def build_core(checkout: Path) -> None:
    """Compile the core of a checkout in place."""
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=checkout, capture_output=True, check=True)


def try_mutant(checkout: Path, mutant: Mutant) -> Outcome:
    """Run the tests of a mutant in a checkout, and restore the file.

    Raises:
        RuntimeError: if the tests could not run.
    """
    file = checkout / mutant.path
    original, began = file.read_text(), time.monotonic()
    file.write_text(mutant.applied(original))
    is_core = file.suffix == ".c"
    try:
        if is_core:
            build_core(checkout)
        code, output = run_tests(checkout, mutant.tests)
    finally:
        file.write_text(original)
        if is_core:
            build_core(checkout)
    if code not in (0, 1):
        raise RuntimeError(f"mutant {mutant.name}: pytest ended with code {code}\n{output[-3000:]}")
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    caught_by = (failed[0] if failed else "a crash of pytest") if code else ""
    return Outcome(mutant, caught_by, time.monotonic() - began)


def main() -> int:
    """Try the mutants that the arguments name, or all; return 1 if one survives."""
    words = sys.argv[1:]
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for number in range(COPIES):
            copy_checkout(Path(folder, str(number)))
            checkouts.put(Path(folder, str(number)))

        def run(mutant: Mutant) -> Outcome:
            checkout = checkouts.get()
            try:
                outcome = try_mutant(checkout, mutant)
            finally:
                checkouts.put(checkout)
            print(
                f"{mutant.name:55} {outcome.seconds:5.0f} s  {outcome.caught_by or 'SURVIVES ' + mutant.tests}",
                flush=True,
            )
            return outcome

        with ThreadPoolExecutor(COPIES) as pool:
            outcomes = list(pool.map(run, chosen))
    survivors = [outcome.mutant.name for outcome in outcomes if not outcome.caught_by]
    print(f"caught {len(outcomes) - len(survivors)} of {len(outcomes)}; survivors: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
