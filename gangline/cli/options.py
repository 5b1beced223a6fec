"""Options that several commands share, and their conversion to arguments of the library."""

from __future__ import annotations

import ast
import inspect
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from gangline.collectives.errors import GanglineError
from gangline.collectives.host_files import write_text
from gangline.usage_error import UsageError

if TYPE_CHECKING:
    from gangline.kvstore.context import Context

T = TypeVar("T")
data_option = partial(typer.Option, rich_help_panel="Network and data")
device_option = partial(typer.Option, rich_help_panel="Devices and workers")

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is stdout.")
]


def _contexts(begin: str) -> list[str]:
    return [word for word in ("auto", "cpu", "gpu", "multi-gpu", "parallel") if word.startswith(begin)]


@dataclass(frozen=True)
class DeviceOptions:
    """Options of every command that runs a network."""

    context: Annotated[str | None, device_option(autocompletion=_contexts)] = None
    """GPUs by index, such as 0,2, or devices by name: auto (one GPU if there is one, the default), cpu, gpu, multi-gpu
    (all GPUs), parallel (all processes of the job; train only)."""
    cpus: Annotated[int | None, device_option(min=1)] = None
    """Number of CPU contexts."""
    work_load_list: Annotated[str | None, device_option()] = None
    """Relative speed of each context, such as 3,1; auto measures it. Batches are split by it."""
    batch_size: Annotated[int, data_option(min=1)] = 64
    """Samples in a batch, over all contexts of all workers."""
    data_workers: Annotated[int, data_option(min=0)] = 0
    """Number of processes that decode images."""
    skip_unreadable: Annotated[int, data_option(min=0)] = 0
    """Skip up to N unreadable images before failing."""

    def devices(self) -> str | list[Context]:
        """Return the context argument of `Module`."""
        if self.cpus is None:
            return self.context or "auto"
        if self.context is not None:
            raise UsageError(f"--context {self.context} and --cpus {self.cpus} are given; expected one of them")
        from gangline.kvstore.context import cpu

        return [cpu(index) for index in range(self.cpus)]

    def loads(self) -> list[float] | Literal["auto"] | None:
        """Return the work_load_list argument of `Module`."""
        return loads_of(self.work_load_list) or None


def command(run: Callable[[T], None], options: type[T]) -> Callable[..., None]:
    """Make a typer command of a function that takes a dataclass of options.

    Each field becomes an option, and the docstring below the field is the help of the option.
    """

    def call(**values: Any) -> None:
        run(options(**values))

    hints = get_type_hints(options, include_extras=True)
    for name, text in _docstrings(options).items():
        if get_origin(hints[name]) is Annotated:
            hints[name].__metadata__[0].help = text
        else:
            hints[name] = Annotated[hints[name], typer.Option(help=text)]
    fields = inspect.signature(options).parameters.values()
    parameters = [field.replace(annotation=hints[field.name], kind=inspect.Parameter.KEYWORD_ONLY) for field in fields]
    parameters.sort(key=lambda field: field.name not in options.__annotations__)  # own fields before inherited ones
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = hints
    call.__doc__, call.__name__ = run.__doc__, run.__name__
    return call


def _docstrings(options: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass, by name."""
    found = {}
    for one in options.__mro__[:-1]:
        for definition in ast.walk(ast.parse(inspect.getsource(one))):
            for pair in pairwise(definition.body if isinstance(definition, ast.ClassDef) else ()):
                match pair:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = " ".join(text.split())
    return found


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Raise `UsageError` for a wrong value in the block: another start of the same command would not help."""
    try:
        yield
    except (ValueError, FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, GanglineError):  # of the job, not of this command
            raise
        raise UsageError(str(error)) from error


def numbers(flag: str, words: str | None, kind: Callable[[str], Any], count: int | None = None) -> list[Any]:
    """Parse numbers separated by commas; an empty list for None."""
    try:
        found = [kind(word) for word in words.split(",")] if words else []
    except ValueError:
        raise UsageError(f"{flag} is {words!r}; expected numbers with commas, such as 3,1") from None
    if found and count is not None and len(found) != count:
        raise UsageError(f"{flag} is {words!r}, {_counted(len(found))}; expected {count}")
    return found


def loads_of(words: str | None) -> list[float] | Literal["auto"]:
    """Parse --work-load-list; an empty list for None."""
    if words == "auto":
        return "auto"
    try:
        return numbers("--work-load-list", words, float)
    except UsageError as error:
        raise UsageError(f"{error}, or auto") from None


def image_shape_of(words: str | None) -> tuple[int, int, int] | None:
    """Parse --image-shape, such as "3,64,64", to (channels, height, width); None for None."""
    if words is None:
        return None
    channels, height, width = numbers("--image-shape", words or ",", int, 3)
    if channels not in (1, 3) or min(height, width) < 1:
        raise UsageError(f"--image-shape is {words!r}; expected 1 or 3 channels, height and width, such as 3,64,64")
    return channels, height, width


def per_channel(flag: str, words: str | None, channels: int) -> tuple[float, ...] | None:
    """Parse one number per channel, or one number for all channels; None for None."""
    found = numbers(flag, words, float)
    if len(found) not in (0, 1, channels):
        raise UsageError(f"{flag} is {words!r}, {_counted(len(found))}; expected one, or {channels}, one a channel")
    return tuple(found * channels if len(found) == 1 else found) or None


def normalization(
    mean: str | None, std: str | None, channels: int
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Parse --rgb-mean and --rgb-std for pixels in [0, 1]; numbers all above 1 are for 0 to 255, as MXNet's."""
    parsed = per_channel("--rgb-mean", mean, channels), per_channel("--rgb-std", std, channels)
    above = [number > 1 for numbers in parsed for number in numbers or ()]
    if not any(above):
        return parsed
    if not all(above):
        shown = ",".join(f"{number / 255 if number > 1 else number:.4g}" for number in parsed[0] or ())
        raise UsageError(
            f"--rgb-mean is {mean!r} and --rgb-std {std!r}, some of them above 1 and others not; expected all of them "
            f"for pixels from 0 to 1, such as --rgb-mean {shown or 0.5}, or all of them for pixels from 0 to 255"
        )
    first, second = (tuple(number / 255 for number in numbers) if numbers else None for numbers in parsed)
    return first, second


def metrics_of(top_k: int, num_classes: int | None) -> list[Any]:
    """Return the metrics to score with: accuracy, and top-k accuracy if ``top_k`` is above 1."""
    if num_classes is not None and top_k > num_classes:
        raise UsageError(f"--top-k is {top_k}, but there are {num_classes} classes")
    return ["acc", *([("top_k_accuracy", {"top_k": top_k})] if top_k > 1 else [])]


def check_network(checkpoint: object, metadata: Mapping[str, Any], network: str | None) -> None:
    """Check that a checkpoint is of the network that --network names."""
    saved = metadata.get("network")
    if network is not None and saved not in (None, network):
        raise UsageError(f"checkpoint {checkpoint} is of network {saved}, but --network is {network}")


def write_json(path: Path | None, value: Any) -> None:
    """Write a value as JSON to a file, or to stdout if the path is ``-``; do nothing if it is None."""
    if path is None:
        return
    text = json.dumps(value, indent=1) + "\n"
    if str(path) == "-":
        print(text, end="")
    else:
        write_text(path, text)


def print_table(columns: dict[str, list[str]]) -> None:
    """Print columns by name, without empty ones."""
    shown = {name: column for name, column in columns.items() if any(column)}
    table = Table(*shown, box=None, pad_edge=False, header_style="bold")
    for values in zip(*shown.values(), strict=True):
        table.add_row(*values)
    Console().print(table)


def _counted(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def signals_of(words: str | None) -> tuple[signal.Signals, ...]:
    """Return the signals of words such as "TERM,USR1"."""
    names = [f"SIG{word.strip().upper().removeprefix('SIG')}" for word in (words or "").split(",") if word.strip()]
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise UsageError(f"{name} is not a signal that can stop a job; expected names such as TERM,USR1")
    return tuple(signal.Signals[name] for name in names)
