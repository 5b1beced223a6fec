"""MXNet's stores replaced by gangline's, to run MXNet's own tests of its stores; see docs/conformance.md.

`python -m tests.conformance.mxnet_stores FILE ARGUMENTS`, or `-m MODULE ARGUMENTS`, runs a program, in an environment
with the real MXNet 1.9.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

import mxnet as mx
import torch
from mxnet.ndarray.sparse import RowSparseNDArray
from torch.utils.dlpack import from_dlpack, to_dlpack

import gangline
from gangline import RowSparse


class Store:
    """A gangline store that takes MXNet's arrays and raises MXNet's error."""

    def __init__(self, name: str = "local") -> None:
        self._store = gangline.create(name)
        self.type, self.rank, self.num_workers = name, self._store.rank, self._store.num_workers
        self._dtypes: dict[Any, torch.dtype] = {}

    def init(self, key: Any, value: Any) -> None:
        values = _each(to_torch, value)
        _call(self._store.init, key, values)
        one_each = zip(key, values, strict=True) if isinstance(key, list) else [(key, values)]
        self._dtypes.update({one: (of[0] if isinstance(of, list) else of).dtype for one, of in one_each})

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        _call(self._store.push, key, _each(to_torch, value), priority=priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        outs = _each(to_torch, out)
        _call(self._store.pull, key, outs, priority=priority, ignore_sparse=ignore_sparse)
        if not ignore_sparse:
            _write_back(outs, out)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        outs = _each(to_torch, out)
        if isinstance(outs, RowSparse):  # MXNet casts
            outs.values = outs.values.to(self._dtypes[key])
        _call(self._store.row_sparse_pull, key, outs, priority=priority, row_ids=_each(to_torch, row_ids))
        _write_back(outs, out)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        outs = _each(to_torch, value if out is None else out)
        _call(self._store.pushpull, key, _each(to_torch, value), outs, priority=priority)

    def set_optimizer(self, optimizer: Any) -> None:
        """Take MXNet's optimizer "test", which adds the scaled gradient."""
        assert isinstance(optimizer, mx.optimizer.Test), optimizer
        self._store.set_optimizer(("sgd", {"learning_rate": 1.0, "rescale_grad": -optimizer.rescale_grad}))

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        _call(self._store.set_gradient_compression, parameters)

    def _set_updater(self, updater: Callable[[Any, Any, Any], None]) -> None:
        def update(key: Any, gradient: Any, weight: torch.Tensor) -> None:
            dense = gradient.to_dense() if isinstance(gradient, RowSparse) else gradient
            updater(key, mx.nd.from_dlpack(to_dlpack(dense)), mx.nd.from_dlpack(to_dlpack(weight)))
            mx.nd.waitall()

        self._store.set_updater(update)


def to_torch(array: Any) -> Any:
    """Return an array in the same memory, a row-sparse one as a copy of its rows."""
    if isinstance(array, RowSparseNDArray):
        rows = torch.from_numpy(array.indices.asnumpy().astype("int64"))
        return RowSparse(rows, torch.from_numpy(array.data.asnumpy()), array.shape)
    return from_dlpack(array.to_dlpack_for_write())


def _each(convert: Callable[[Any], Any], values: Any) -> Any:
    return [_each(convert, one) for one in values] if isinstance(values, (list, tuple)) else convert(values)


def _write_back(outs: Any, arrays: Any) -> None:
    if isinstance(outs, list):
        for out, array in zip(outs, arrays, strict=True):
            _write_back(out, array)
    elif isinstance(outs, RowSparse):
        rows = (outs.values.numpy(), outs.indices.numpy())
        mx.nd.sparse.row_sparse_array(rows, shape=tuple(outs.shape), dtype=arrays.dtype).copyto(arrays)


def _call(call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise mx.base.MXNetError(str(error)) from error


mx.kv.create = mx.kvstore.create = Store

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
