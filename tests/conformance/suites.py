"""The suites of others on gangline: ``python -m tests.conformance.suites --torch --horovod FOLDER --mxnet FOLDER``.

The folders are checkouts; torch's tests are in its wheel. docs/conformance.md names the tests that differ, and how: its
tables are read here. The exit code is 1 if a test differs that the page does not name.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.conformance import outcomes
from tests.programs import ROOT, environment

PAGE = ROOT / "docs" / "conformance.md"
MXNET_PYTHON = ROOT / ".peers" / "mxnet-gangline" / "bin" / "python"
SECONDS = 900
"""Limit of one command."""

PYTEST = ("-m", "pytest", "-q", "--tb=native", "-p", "no:cacheprovider", "-p", "tests.conformance.outcomes")
CHANGES = {
    "test_kvstore.py": {"mx.gpu(": "mx.cpu("},
    "dist_sync_kvstore.py": {
        "num_rows/2": "num_rows//2",
        "kv = init_kv()\n        kv, threshold": "kv = set_optimizer(opt.multiprecision)\n        kv, threshold",
    },
}
"""Changes in MXNet's nightly scripts: contexts, a division of Python 2, and the optimizer that --type all sets."""

Outcomes = dict[str, str]
"""Outcomes of tests by their names: passed, skipped, failed, not run (the process ended), left out, or as gloo."""


def named(section: str) -> dict[str, str]:
    """Return what the page's table of a section says of tests: differs, not run or alone (in its own process)."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (differs|not run|alone) \|", text, re.MULTILINE)
    return {test: how for tests, how in rows for test in re.findall(r"`(.+?)`", tests)}


def run(command: list[str], folder: Path, **variables: str) -> tuple[int, str]:
    """Return the exit code of a command and what it printed."""
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(**variables), stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
            printed.write(f"\nended after {SECONDS} s\n")
        printed.seek(0)
        return code, printed.read()


def run_pytest(command: list[str], folder: Path, ranks: int) -> Outcomes:
    """Return the outcomes of tests on all ranks: a test that fails on one of them has failed."""
    with tempfile.TemporaryDirectory() as written:
        code, printed = run(command, folder, GANGLINE_REPLICA_CHECK="0", **{outcomes.VARIABLE: written})
        files = [file.read_text().splitlines() for file in Path(written).glob("*.txt")]
    if len(files) != ranks:
        sys.exit(
            f"{' '.join(command)}: {len(files)} of {ranks} ranks collected tests, exit code {code}:\n{printed[-3_000:]}"
        )
    found = [dict(line.split("\t") for line in lines) for lines in files]
    worst = ("failed", "not run", "skipped", "passed")
    return {test: min((rank.get(test, "not run") for rank in found), key=worst.index) for test in found[0]}


def horovod(checkout: Path) -> Iterator[tuple[str, Outcomes]]:
    """Run Horovod's tests for torch on 2 ranks, and those of elastic state on one."""
    launch = [sys.executable, "-m", "gangline", "launch", "-np", "2", "-s", "0", "--", sys.executable]
    words = [*PYTEST, "-p", "tests.conformance.horovod_names"]
    parallel = checkout / "test" / "parallel"
    left_out = [test for test, how in named("Horovod").items() if how != "differs"]
    deselected = [word for test in left_out for word in ("--deselect", f"test_torch.py::TorchTests::{test}")]
    found = run_pytest([*launch, *words, *deselected, "test_torch.py"], parallel, ranks=2)
    text = (parallel / "test_torch.py").read_text()
    for test in (test for test in left_out if f"def {test}(" in text):
        if named("Horovod")[test] == "alone":
            found |= run_pytest([*launch, *words, f"test_torch.py::TorchTests::{test}"], parallel, ranks=2)
        else:
            found[test] = "left out"
    yield "Horovod, test/parallel/test_torch.py, 2 ranks", found
    single = checkout / "test" / "single"
    if (single / "test_torch_elastic.py").exists():
        found = run_pytest([sys.executable, *words, "test_torch_elastic.py"], single, ranks=1)
        yield "Horovod, test/single/test_torch_elastic.py, 1 rank", found


def mxnet(checkout: Path, python: Path) -> Iterator[tuple[str, Outcomes]]:
    """Run MXNet's tests of its stores in an environment that has the real MXNet."""
    one = [str(python), "-m", "tests.conformance.mxnet_stores"]
    launch = [str(python), "-m", "gangline", "launch", "-n", "2", "-s", "2", "--", *one]
    unit = checkout / "tests" / "python" / "unittest"
    if (unit / "test_kvstore.py").exists():
        found = run_pytest([*one, *PYTEST, "test_kvstore.py"], unit, ranks=1)
        yield "MXNet, tests/python/unittest/test_kvstore.py, 1 rank", found
    with tempfile.TemporaryDirectory() as copies:
        for name, changes in CHANGES.items():
            text = (checkout / "tests" / "nightly" / name).read_text()
            for before, after in changes.items():
                text = text.replace(before, after)
            (Path(copies) / name).write_text(text)
        found = run_script([*one, "test_kvstore.py"], Path(copies))
        yield "MXNet, tests/nightly/test_kvstore.py, 1 rank, 4 contexts", found
        types = ("init_gpu", "default_cpu", "compressed_cpu")
        found = {}
        for kind in types if "'init_gpu'" in text else ("init", "default", "compressed"):
            found |= run_script([*launch, "dist_sync_kvstore.py", "--no-gpu", "--type", kind], Path(copies))
        yield "MXNet, tests/nightly/dist_sync_kvstore.py, 2 ranks, 2 servers", found


def run_script(command: list[str], folder: Path) -> Outcomes:
    """Return the outcome of a script, which is one test."""
    code, printed = run(command, folder)
    if code:
        print(printed[-3_000:])
    return {" ".join(command[command.index("tests.conformance.mxnet_stores") + 1 :]): "failed" if code else "passed"}


def torch() -> Iterator[tuple[str, Outcomes]]:
    """Run torch's tests of its backends over gloo and over gangline; what fails with both is "as gloo"."""
    from tests.collectives.test_torch_suite import outcomes_of

    for size in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            by_gloo = outcomes_of("gloo", size, folder)
            found = {name: outcome for name, (outcome, _) in outcomes_of("gangline", size, folder).items()}
        same = [name for name, outcome in found.items() if outcome == "failed" == by_gloo[name][0]]
        yield f"torch, its tests of torch.distributed, {size} ranks", found | dict.fromkeys(same, "as gloo")


def report(title: str, found: Outcomes, differ: set[str]) -> int:
    """Print the counts of a suite, and its tests that differ from the page; return how many the page does not name."""
    counts = Counter("differ" if outcome in ("failed", "not run") else outcome for outcome in found.values())
    shown = ("passed", "skipped", "differ", *(sorted({"left out", "as gloo"} & counts.keys())))
    print(f"{title}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in shown)}", flush=True)
    failed = {test for test, outcome in found.items() if outcome in ("failed", "not run")}
    for test in sorted(failed - differ):
        print(f"  differs, and docs/conformance.md does not name it: {test} ({found[test]})")
    for test in sorted(differ & {test for test, outcome in found.items() if outcome == "passed"}):
        print(f"  passes, and docs/conformance.md says that it differs: {test}")
    return len(failed - differ)


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, empty for a folder without one."""
    done = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return f" at {done.stdout.strip()}" if done.returncode == 0 else ""


def main() -> int:
    """Run the suites that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="torch's own tests, from its wheel")
    parser.add_argument("--horovod", type=Path, help="checkout of Horovod")
    parser.add_argument("--mxnet", type=Path, help="checkout of MXNet")
    parser.add_argument("--mxnet-python", type=Path, default=MXNET_PYTHON, help="Python with MXNet, torch and pytest")
    options = parser.parse_args()
    if options.mxnet and not options.mxnet_python.exists():
        parser.error(f"{options.mxnet_python} does not exist: make .peers/mxnet-gangline/.installed PYTHON=python3.11")
    suites = []
    if options.torch:
        suites.append(("torch.distributed", "", torch()))
    if options.horovod:
        suites.append(("Horovod", commit(options.horovod), horovod(options.horovod)))
    if options.mxnet:
        suites.append(("MXNet", commit(options.mxnet), mxnet(options.mxnet, options.mxnet_python.absolute())))
    unnamed = 0
    for section, text, parts in suites:
        differ = {test for test, how in named(section).items() if how == "differs"}
        for title, found in parts:
            unnamed += report(title + text, found, differ)
    return 1 if unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
