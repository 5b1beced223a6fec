"""`gangline bench simplicity`: how large and how deep the code is."""

from __future__ import annotations

import ast
import inspect
import io
import json as json_format
import os
import socket
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import gangline
from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, write_json
from gangline.bench.report.rows import Row
from gangline.bench.workload.options import Json

PACKAGES = ("collectives", "kvstore", "models", "bench")
_ROOT = Path(gangline.__file__).parent
_KINDS = ("code", "docstring", "comment", "blank")
_NUMEL = 4 << 20  # elements of the all-reduce: far above the limits of the paths for small messages
_TORCH_WORK = {"copy_", "add", "add_", "sum", "mul_", "maximum", "minimum"}
_SKIP = tokenize.ENCODING, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER


def simplicity(json: Json = None) -> None:
    """Print the simplicity budget: lines, files per folder, import cycles, call depth, rounds to open a communicator.

    Lines are those of the Python files of the four packages without tests. A line is a docstring or a comment if
    nothing else is on it. An import cycle is a set of files that import each other, also inside functions;
    imports for type checking do not count. Frames are the Python frames of a large all_reduce between two ranks over
    shared memory, from the public call to the deepest one that copies or reduces bytes. Rounds are the calls of the
    bootstrap all-gather with which rank 0 of two opens a communicator.
    """
    check_outputs(json)
    rows = measure()
    print("# Simplicity budget")
    for row in rows:
        print(f"{row['measure']:32} {row['value']:7,}  {row['detail']}")
    if json is not None:
        write_json(command_line(), rows, json)


def measure() -> list[Row]:
    """Return a row for each line of the table: ``measure``, ``value`` and ``detail``."""
    counted = {package: _lines_of(package) for package in PACKAGES}
    total = sum(counted.values(), Counter[str]())
    rows = [_row("lines of the four packages", total.total(), _share(total))]
    rows += [_row(f"  {package}", lines.total(), _share(lines)) for package, lines in counted.items()]
    files = Counter(path.parent for package in PACKAGES for path in _files(package))
    [(folder, most)] = files.most_common(1)
    over = sum(count > 12 for count in files.values())
    rows.append(_row("files in the largest folder", most, f"{folder.relative_to(_ROOT)}; {over} folders above 12"))
    cycles = import_cycles(import_graph())
    rows.append(_row("import cycles between files", len(cycles), "; ".join(map(_cycle, cycles))))
    rank = _measure_ranks()
    rows.append(_row("frames of a large all_reduce", rank["frames"], " > ".join(rank["stack"])))
    rows.append(_row("rounds to open a communicator", rank["rounds"], "2 ranks on one host"))
    return rows


def count_lines(source: str) -> Counter[str]:
    """Count the lines of a Python file by kind: code, docstring, comment or blank."""
    kinds: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _SKIP:
            continue
        kind = "comment" if token.type == tokenize.COMMENT else "code"
        for line in range(token.start[0], token.end[0] + 1):
            if kinds.get(line) != "code":
                kinds[line] = kind
    for start, end in _docstrings(ast.parse(source)):
        kinds.update(dict.fromkeys(range(start, end + 1), "docstring"))
    return Counter(kinds.get(number, "blank") for number in range(1, len(source.splitlines()) + 1))


def import_graph(root: Path = _ROOT, package: str = "gangline") -> dict[str, set[str]]:
    """Return the modules that each module of a package imports, anywhere except for type checking."""
    modules = {_module_name(path, root, package): path for path in _python_files(root)}
    return {name: set(_imports(path, name, modules)) - {name} for name, path in modules.items()}


def import_cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = [stack.pop()]
            while component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def run_rank(rank: int, port: int) -> None:
    """Measure frames and rounds as one of two ranks; rank 0 prints them as JSON."""
    import torch

    from gangline import collectives
    from gangline.collectives.bootstrap import rendezvous

    rounds = _count_calls(rendezvous.Rendezvous)
    comm = collectives.connect(rank, 2, f"127.0.0.1:{port}", transport="shared_memory")
    opened = rounds[0]
    data = torch.ones(_NUMEL)
    comm.all_reduce(data)  # imports and allocations are not part of the measured call
    stack = _deepest_stack(lambda: comm.all_reduce(data))
    comm.close()
    if rank == 0:
        print(json_format.dumps({"rounds": opened, "frames": len(stack), "stack": stack}))


def _measure_ranks() -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = f"import sys; from {__name__} import run_rank; run_rank(int(sys.argv[1]), int(sys.argv[2]))"
    env = {**os.environ, "PYTHONPATH": str(_ROOT.parent), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(port)], stdout=subprocess.PIPE, text=True, env=env)
        for rank in range(2)
    ]
    try:
        output, _ = [rank.communicate(timeout=120)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"ranks exited with {[rank.returncode for rank in ranks]}; their errors are above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    measured: dict[str, Any] = json_format.loads(output)
    return measured


def _count_calls(rendezvous: type) -> list[int]:
    """Count the calls of the bootstrap all-gather: the method that takes bytes and returns a list of bytes."""
    calls = [0]
    for name, method in inspect.getmembers(rendezvous, inspect.isfunction):
        signature = inspect.signature(method)
        given = [parameter.annotation for parameter in signature.parameters.values()][1:]
        if name.startswith("_") or given[:1] != ["bytes"] or signature.return_annotation != "list[bytes]":
            continue

        def counting(self: Any, *arguments: Any, method: Callable[..., Any] = method) -> Any:
            calls[0] += 1
            return method(self, *arguments)

        setattr(rendezvous, name, wraps(method)(counting))
    return calls


def _deepest_stack(call: Callable[[], object]) -> list[str]:
    """Return the Python functions on the stack of a call when it moves bytes, where that stack is deepest."""
    deepest: list[str] = []

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal deepest
        if event == "c_call" and _moves_bytes(function):
            stack = list(_names(frame))[::-1]
            if len(stack) > len(deepest):
                deepest = stack

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return deepest


def _names(frame: FrameType | None) -> Iterator[str]:
    """Yield the functions from a frame up to the public call."""
    while frame is not None and frame.f_globals.get("__name__") != __name__:
        yield f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        frame = frame.f_back


def _moves_bytes(function: Any) -> bool:
    """Return whether a C function is a large tensor's operation, or prepares a foreign call on its memory."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if name in ("byref", "memmove"):
        return True
    if name not in _TORCH_WORK:
        return False
    return "torch" in type(owner).__module__ or "torch" in str(getattr(owner, "__module__", ""))


def _row(name: str, value: int, detail: str) -> Row:
    return {"who": "gangline", "measure": name, "value": value, "detail": detail}


def _share(lines: Counter[str]) -> str:
    return ", ".join(f"{kind} {lines[kind]}" for kind in _KINDS)


def _cycle(modules: list[str]) -> str:
    return f"{len(modules)}: {', '.join(name.removeprefix('gangline.') for name in modules[:6])}" + (
        ", ..." if len(modules) > 6 else ""
    )


def _lines_of(package: str) -> Counter[str]:
    return sum((count_lines(path.read_text()) for path in _files(package)), Counter[str]())


def _files(package: str) -> list[Path]:
    return _python_files(_ROOT / package)


def _python_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder, also through links to folders."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        found += [Path(parent, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _module_name(path: Path, root: Path, package: str) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join((package, *parts[: -1 if parts[-1] == "__init__" else None]))


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of each string that stands alone: docstrings of functions and of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno


def _imports(path: Path, name: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules among ``modules`` that a file imports when it runs."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{source}.{alias.name}" in modules:
                    yield f"{source}.{alias.name}"
                elif source in modules:
                    yield source


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without those for type checking."""
    yield node
    skipped = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in node.orelse if isinstance(node, ast.If) and skipped else ast.iter_child_nodes(node):
        yield from _running(child)
