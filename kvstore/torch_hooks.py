"""Record what a torch program does on each device: reading batches, forward, backward, updating the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from gangline.collectives.timeline import recorder


class _Running(threading.local):
    """The module, forward and step that a thread is in."""

    modules: int = 0
    """Depth of nested modules in forward."""
    forward_began: int = 0
    samples: int = 0
    """Length of the first input of this forward."""
    step_began: int = 0


_running = _Running()
_is_watching: list[bool] = []


def watch_torch() -> None:
    """Record every forward of an outermost module, backward, optimizer step and wait for a DataLoader, if recording.

    The spans are "forward" ("evaluation" without gradients), "backward", "update" and "data". Each submodule's forward
    then costs some microseconds. On GPUs the spans are those of the host, which launches kernels.
    """
    timeline = recorder.current
    if timeline is None or _is_watching:
        return
    _is_watching.append(True)

    def before_forward(_module: nn.Module, inputs: Any) -> None:
        _running.modules += 1
        if _running.modules == 1:
            first = inputs[0] if inputs else None
            _running.samples = len(first) if isinstance(first, torch.Tensor) and first.dim() else 0
            _running.forward_began = time.monotonic_ns()

    def after_forward(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        _running.modules -= 1
        if not _running.modules:
            name = "forward" if torch.is_grad_enabled() else "evaluation"
            timeline.add(name, _running.forward_began, samples=_running.samples)

    def before_step(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        _running.step_began = time.monotonic_ns()

    def after_step(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        timeline.add("update", _running.step_began)

    register_module_forward_pre_hook(before_forward)
    register_module_forward_hook(after_forward, always_call=True)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    torch.autograd.backward = _recorded(torch.autograd.backward, "backward", timeline)
    iterator = dataloader._BaseDataLoaderIter
    iterator.__next__ = _recorded(iterator.__next__, "data", timeline)  # type: ignore[method-assign]


def _recorded(function: Callable[..., Any], name: str, timeline: recorder.Timeline) -> Callable[..., Any]:
    """Return a function that records each call as a span."""

    @wraps(function)
    def recorded(*arguments: Any, **options: Any) -> Any:
        with timeline.span(name):
            return function(*arguments, **options)

    return recorded
