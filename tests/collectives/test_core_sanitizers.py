"""core.c compiled without warnings, and run under sanitizers, each of which finds a fault that is put into it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import ROOT, environment

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

PROGRAM = """
import sys, gangline
gangline.__path__.insert(0, sys.argv[1])
from tests.collectives.build_program import main
main(*sys.argv[1:])
"""


class Sanitizer(NamedTuple):
    """Holds how core.c is built and run, and a fault that must be found."""

    options: str
    library: str
    """To load before all others."""
    ranks: str
    """Kind of ranks of `build_program`."""
    variables: dict[str, str]
    before: str
    """Text before core.c."""
    fault: str
    """The same, to put a fault into it."""
    report: str
    """Begin of the report of the fault."""


PLAIN_COPIES = "-U__SSE2__"  # no sanitizer sees stores past the cache
SANITIZERS = {
    "address": Sanitizer(
        f"-fsanitize=address {PLAIN_COPIES}",
        "libasan.so",
        "processes",
        {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},
        "#include <string.h>\n",
        "#define memcpy(to, from, n) memcpy(to, from, (n) + ((n) > 4096))\n",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "undefined": Sanitizer(
        "-fsanitize=undefined,float-cast-overflow,float-divide-by-zero -fno-sanitize-recover=all",
        "libubsan.so",
        "processes",
        {"UBSAN_OPTIONS": "print_stacktrace=1"},
        "",
        "#define aligned(bytes) may_alias\n",
        "runtime error: load of misaligned address",
    ),
    "thread": Sanitizer(
        f"-fsanitize=thread {PLAIN_COPIES} -Wno-tsan",
        "libtsan.so",
        "threads",
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},  # reports nothing of libzmq and torch
        """
        #include <stdatomic.h>
        #include <string.h>
        static inline void *copied(char *to, const char *from, size_t n) { /* libc's memcpy is not instrumented */
            for (size_t i = 0; i < n; i++) to[i] = from[i];
            return to;
        }
        #define memcpy(to, from, n) copied((char *)(to), (const char *)(from), n)
        """,
        "#define memory_order_acquire memory_order_relaxed\n",
        "ThreadSanitizer: data race",
    ),
}


def compile_core(*options: object) -> None:
    """Compile core.c as setuptools does, with more options."""
    [module] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    includes = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
    sources = [ROOT / source for source in module["sources"]]
    words = ["gcc", *module["extra-compile-args"], "-fPIC", *includes, *sources, *options]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_program(folder: Path, sanitizer: Sanitizer, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Build core.c in a folder and run `build_program` with it."""
    before = folder / "before.h"
    before.write_text(sanitizer.before + fault)
    built = ["-shared", "-include", before, "-o", folder / "_core.so"]
    compile_core("-O1", "-g", *sanitizer.options.split(), *built)
    where = ["gcc", f"-print-file-name={sanitizer.library}"]
    library = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-c", PROGRAM, str(folder), sanitizer.ranks]
    variables = environment(LD_PRELOAD=library, **sanitizer.variables)
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=550)


@pytest.mark.parametrize("options", ["", PLAIN_COPIES], ids=["", "without SSE2"])
def test_the_core_compiles_without_warnings(options: str, tmp_path: Path) -> None:
    compile_core("-Wall", "-Wextra", "-Wconversion", "-Werror", *options.split(), "-c", "-o", tmp_path / "core.o")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_nothing(name: str, tmp_path: Path) -> None:
    done = run_program(tmp_path, SANITIZERS[name])
    assert (done.stdout, done.returncode) == ("equal\n", 0), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_a_fault(name: str, tmp_path: Path) -> None:
    sanitizer = SANITIZERS[name]
    done = run_program(tmp_path, sanitizer, sanitizer.fault)
    assert done.returncode != 0
    assert sanitizer.report in done.stderr, done.stderr
