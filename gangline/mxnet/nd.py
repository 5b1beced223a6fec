"""`mx.nd`: torch tensors that answer to MXNet's methods too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gangline.kvstore.context import Context, cpu
from gangline.kvstore.optimizer import files


class NDArray(torch.Tensor):
    """A tensor with MXNet's methods. ``size`` is torch's, a method; the gradient of a vector is that of its sum."""

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return a copy as a numpy array."""
        return self.detach().cpu().as_subclass(torch.Tensor).numpy().copy()

    def asscalar(self) -> Any:
        """Return the only element."""
        return self.item()

    def wait_to_read(self) -> None:
        """Wait until the value is computed."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def context(self) -> Context:
        """The device."""
        return Context("gpu", self.device.index or 0) if self.is_cuda else cpu()

    ctx = context

    def as_in_context(self, context: Context) -> NDArray:
        """Return the array on a device."""
        return wrap(self.to(context.torch_device))

    def astype(self, dtype: Any) -> NDArray:
        """Return the array with another dtype."""
        return wrap(self.to(_dtype(dtype)))

    def attach_grad(self) -> None:
        """Compute gradients of this array from now on."""
        self.requires_grad_()

    def backward(self, out_grad: torch.Tensor | None = None, **options: Any) -> None:  # type: ignore[override]
        """Compute gradients of the sum of the elements."""
        torch.autograd.backward(self, torch.ones_like(self) if out_grad is None else out_grad, **options)


def wrap(tensor: torch.Tensor) -> NDArray:
    """Return a tensor with MXNet's methods, in the same memory."""
    return tensor.as_subclass(NDArray)


def _dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.empty(0, np.dtype(dtype))).dtype


def array(source: Any, ctx: Context | None = None, dtype: Any = None) -> NDArray:
    """Return a copy; without a dtype, of a tensor's own dtype, and float32 of all else."""
    is_tensor = isinstance(source, torch.Tensor)
    given = source if is_tensor else torch.from_numpy(np.array(source))
    own = given.dtype if dtype is None and is_tensor else _dtype(dtype or "float32")
    return wrap(given.detach().to((ctx or cpu()).torch_device, own, copy=True))


def zeros(shape: int | Sequence[int], ctx: Context | None = None, dtype: Any = "float32") -> NDArray:
    """Return zeros."""
    return wrap(torch.zeros(shape, dtype=_dtype(dtype), device=(ctx or cpu()).torch_device))


def ones(shape: int | Sequence[int], ctx: Context | None = None, dtype: Any = "float32") -> NDArray:
    """Return ones."""
    return wrap(zeros(shape, ctx, dtype) + 1)


def save(fname: str | Path, data: Any) -> None:
    """Write an array, a list or a dict of them; the format is that of safetensors, whatever the name."""
    is_dict = isinstance(data, Mapping)
    arrays = [data] if isinstance(data, torch.Tensor) else data
    named = data if is_dict else {str(number): one for number, one in enumerate(arrays)}
    plain = {name: one.detach().as_subclass(torch.Tensor) for name, one in named.items()}
    files.save(Path(fname), plain, {"is_list": not is_dict})


def load(fname: str | Path) -> Any:
    """Return what `save` has written: a dict, or a list.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or gangline did not write it.
    """
    tensors, header = files.load(Path(fname))
    found = {name: wrap(one) for name, one in tensors.items()}
    return [found[str(number)] for number in range(len(found))] if header.get("is_list") else found


def waitall() -> None:
    """Wait until all devices are idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seed(seed_state: int) -> None:
    """Seed the random numbers of all devices."""
    torch.manual_seed(seed_state)
