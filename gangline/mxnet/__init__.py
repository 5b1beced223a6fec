"""MXNet 1.x's names for its Module and Gluon scripts: `import gangline.mxnet as mx`. Networks are torch modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gangline.kvstore.context import Context as Context
from gangline.kvstore.context import cpu as cpu
from gangline.kvstore.context import gpu as gpu
from gangline.kvstore.context import num_gpus as num_gpus
from gangline.kvstore.registry import create as _create
from gangline.mxnet import autograd as autograd
from gangline.mxnet import callback as callback
from gangline.mxnet import gluon as gluon
from gangline.mxnet import init as init
from gangline.mxnet import io as io
from gangline.mxnet import lr_scheduler as lr_scheduler
from gangline.mxnet import metric as metric
from gangline.mxnet import model as model
from gangline.mxnet import module as mod
from gangline.mxnet import nd as nd

initializer, module = init, mod
kv = kvstore = SimpleNamespace(create=_create)
random = SimpleNamespace(seed=nd.seed)


def __getattr__(name: str) -> Any:
    if name in ("sym", "symbol"):
        raise AttributeError(
            f"mx.{name} does not exist: write the network as a torch.nn.Module (docs/coming-from-mxnet.md) and pass it "
            "to mx.mod.Module"
        )
    if name in ("mon", "monitor"):
        raise AttributeError(f"mx.{name} does not exist: read layers with torch's register_forward_hook")
    if name in ("opt", "optimizer"):
        raise AttributeError(
            f"mx.{name} does not exist: name the optimizer and its arguments instead, as in optimizer='sgd', "
            "optimizer_params={'learning_rate': 0.1}, or ('sgd', {'learning_rate': 0.1}) for a store"
        )
    raise AttributeError(f"module 'gangline.mxnet' has no attribute {name!r}")
