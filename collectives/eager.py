"""Keeps torch.compile, inference mode and the transforms of torch.func out of gangline's calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch._C._functorch import maybe_current_level

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # private names, which a later torch may rename
    set_code_exec_strategy = None  # type: ignore[assignment]


T = TypeVar("T", bound=Callable[..., Any])
_NO_MODES = nullcontext()


def has_modes() -> bool:
    """Return whether this thread is in inference mode or in a transform of torch.func, such as grad or vmap."""
    return torch.is_inference_mode_enabled() or maybe_current_level() is not None


def outside_modes() -> AbstractContextManager[None]:
    """Leave the modes of `has_modes` for a while: tensors made in them could not be kept and written later."""
    return leave_modes() if has_modes() else _NO_MODES


@contextmanager
def leave_modes() -> Iterator[None]:
    """Leave them, as `outside_modes`; also a decorator."""
    with torch.inference_mode(mode=False), torch._C._DisableFuncTorch():
        yield


def run_eagerly(of: T) -> T:
    """Decorator: keep torch.compile from tracing a function, or the functions of a class, and all that they call.

    Dynamo compiles each Python function that compiled code calls, C++ between them or not. It sees a process group as
    an opaque object, of which it refuses to read attributes, and it raises if a second pass over a function takes
    another branch, because another thread has ended the call in between.
    """
    if not inspect.isclass(of):
        return cast(T, _eager(of))
    for name, member in list(vars(of).items()):
        if inspect.isfunction(member) or isinstance(member, property):
            setattr(of, name, _eager(member))
    return of


def _eager(member: Any) -> Any:
    function: Any = member.fget if isinstance(member, property) else member
    if set_code_exec_strategy is None:  # the public function costs a frame more in each call
        eager = torch.compiler.disable(function)
        return property(eager, member.fset, member.fdel, member.__doc__) if isinstance(member, property) else eager
    function._torchdynamo_disable = True  # not inlined in compiled callers
    function._torchdynamo_disable_msg = "gangline runs eagerly"
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return member
