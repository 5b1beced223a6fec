"""Training steps of MXNet's Module on CPU contexts."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon.model_zoo import vision


def join() -> dict[str, Any]:
    """Return what `serve.py` needs."""
    return {"who": f"mxnet {mx.__version__}", "prepare": prepare}


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Build a Module on random images.

    Args:
        options: ``network`` ("lenet" or a ResNet of Gluon's zoo, such as "resnet18"), ``image_shape``, ``classes``,
            ``batch_size``, ``contexts`` (words such as "cpu(0),cpu(1)") and ``store``.
    """
    mx.random.seed(0)
    batch = (options["batch_size"], *options["image_shape"])
    random = np.random.default_rng(0)
    data = mx.nd.array(random.random(batch, dtype=np.float32))
    label = mx.nd.array(random.integers(options["classes"], size=options["batch_size"]))
    contexts = [mx.cpu(place) for place in range(options["contexts"].count(",") + 1)]
    module = mx.mod.Module(_symbol(options["network"], options["classes"]), context=contexts)
    module.bind([("data", batch)], [("softmax_label", label.shape)])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(options["store"], "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    one = mx.io.DataBatch([data], [label])

    def step() -> None:
        module.forward_backward(one)
        module.update()

    return {"step": step, "wait": mx.nd.waitall}


def _symbol(network: str, classes: int) -> Any:
    """Return the network with softmax and cross-entropy as its last layers."""
    data = mx.sym.var("data")
    if network == "lenet":
        return mx.sym.SoftmaxOutput(_lenet(data, classes), name="softmax")
    build = getattr(vision, f"{network}_v1", None)
    if build is None:
        raise ValueError(f"MXNet has no network {network!r}; expected lenet, resnet18, resnet34 or resnet50")
    return mx.sym.SoftmaxOutput(build(classes=classes)(data), name="softmax")


def _lenet(data: Any, classes: int) -> Any:
    """Return gangline's LeNet: tanh, 20 and 50 channels of 5x5, 500 hidden units."""
    for number, channels in enumerate((20, 50), start=1):
        data = mx.sym.Convolution(data, kernel=(5, 5), num_filter=channels, name=f"conv{number}")
        data = mx.sym.Activation(data, act_type="tanh")
        data = mx.sym.Pooling(data, pool_type="max", kernel=(2, 2), stride=(2, 2))
    data = mx.sym.FullyConnected(mx.sym.flatten(data), num_hidden=500, name="fc1")
    data = mx.sym.Activation(data, act_type="tanh")
    return mx.sym.FullyConnected(data, num_hidden=classes, name="fc2")
