"""Calls of functions in other processes of this user on this host: pickling, the caller's script, errors. No torch."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import get_preparation_data, prepare
from typing import Any, NamedTuple

from gangline.collectives import errors

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

HAS_CLOUDPICKLE = cloudpickle is not None
SCRIPT = ("init_main_from_path", "init_main_from_name")
"""Entries of a `preparation` by which the caller's script is imported."""
_PLAIN = (str, bytes, int, float, type(None))
_is_importing = False


class ErrorReport(NamedTuple):
    """Exception of a process as plain data."""

    when: float
    """Time by `time.monotonic`, in seconds; its clock is common to all processes of a machine."""
    name: str
    """Name of its class, or of the nearest base class that is built in or gangline's."""
    arguments: tuple[Any, ...]
    notes: tuple[str, ...]
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Convert an exception."""
        when = time.monotonic()
        own = type(error)
        name = next((base.__name__ for base in own.__mro__ if _is_known(base, own)), "RuntimeError")
        arguments: tuple[Any, ...] = (str(error),)
        if name != own.__name__:
            arguments = (f"{own.__module__}.{own.__qualname__}: {error}",)
        elif all(isinstance(argument, _PLAIN) for argument in error.__reduce__()[1]):
            arguments = tuple(error.__reduce__()[1])
        notes = tuple(str(note) for note in getattr(error, "__notes__", ()))
        return cls(when, name, arguments, notes, "".join(traceback.format_exception(error)))

    def error(self, process: str) -> Exception:
        """Return the exception, without objects that it held; a note has the process's name and the traceback."""
        known = getattr(errors, self.name, None) or getattr(builtins, self.name)
        try:
            error: Exception = known(*self.arguments)
        except TypeError:  # the class does not accept a text
            error = RuntimeError(f"{self.name}: {self.arguments[0]}")
        for note in (*self.notes, f"raised by {process}:\n{self.trace}"):
            error.add_note(note)
        return error


def _is_known(base: type, own: type) -> bool:
    if not issubclass(base, Exception) or (base is Exception and own is not Exception):
        return False
    return base.__module__ == errors.__name__ or getattr(builtins, base.__name__, None) is base


def _pickler_of(base: Any) -> Any:
    class Pickler(base):  # type: ignore[misc]  # one of two bases
        """Pickler that copies tensors, whose memory may end with this process; torch passes descriptors."""

        def reducer_override(self, value: object) -> Any:
            reduced = NotImplemented
            if "torch" in sys.modules:  # else there are no tensors, and importing it takes seconds
                reduced = import_module("gangline.collectives.processes.rank_main").reduce_tensor(value)
            is_left = reduced is NotImplemented and base is not ForkingPickler
            return super().reducer_override(value) if is_left else reduced

    return Pickler


_ByName = _pickler_of(ForkingPickler)
_ByValue = _pickler_of(ForkingPickler if cloudpickle is None else cloudpickle.Pickler)


def pack(value: Any, *, by_value: bool = False) -> bytes:
    """Pickle a value; with ``by_value``, also functions and classes of ``__main__`` if cloudpickle is installed."""
    buffer = io.BytesIO()
    (_ByValue if by_value else _ByName)(buffer, 5).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Unpickle a value; only for bytes from a process of the same job on this host."""
    return pickle.loads(packed)  # noqa: S301


def pack_call(
    caller: str, opener: tuple[Any, ...], fn: Callable[..., Any], args: tuple[Any, ...], refusal: str, *, by_value: bool
) -> bytes:
    """Pickle ``(*opener, fn, args)``.

    Raises:
        ValueError: if that is not possible; the text names the argument, or is ``refusal`` with the function as {fn}
            and the reason as {why}.
    """
    try:
        return pack((*opener, fn, args), by_value=by_value)
    except Exception as error:
        for index, value in enumerate((fn, *args)):
            try:
                pack(value, by_value=by_value)
            except Exception as cause:
                name = f"argument {index} of {caller}, of type {type(value).__name__}, cannot be pickled: {cause}"
                raise ValueError(name if index else refusal.format(fn=repr(fn), why=cause)) from cause
        raise ValueError(f"the function and arguments of {caller} cannot be pickled: {error}") from error


def program_is_file() -> bool:
    """Return whether this program is a script or module, which other processes can import."""
    return os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or "")


def preparation(*unwanted: str) -> dict[str, Any]:
    """Return what `import_script` takes: what multiprocessing sends to its children, without ``unwanted``."""
    data = {**get_preparation_data(""), "dir": os.getcwd()}
    data["authkey"] = bytes(data["authkey"])  # an AuthenticationString cannot be pickled
    if not program_is_file():  # it comes from standard input
        unwanted += SCRIPT
    return {name: value for name, value in data.items() if name not in unwanted}


def import_script(preparation: dict[str, Any], process: str) -> None:
    """Import the caller's script in this process, which gets a name."""
    global _is_importing
    _is_importing = True
    try:
        prepare({**preparation, "name": process})
    finally:
        _is_importing = False


def check_not_importing(problem: str, remedy: str) -> None:
    """Raise RuntimeError with these texts if this process imports its caller's script."""
    if _is_importing:
        raise RuntimeError(f'{problem} {sys.argv[0]!r}; call it under `if __name__ == "__main__":`, {remedy}')


def check_count(name: str, value: object, least: int = 1) -> None:
    """Check an argument that is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value < least:
        raise ValueError(f"{name} is {value}; expected at least {least}")
