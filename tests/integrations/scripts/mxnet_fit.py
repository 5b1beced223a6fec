"""MXNet's `Module.fit` on two contexts of unequal speed: `python mxnet_fit.py mxnet FOLDER`, or gangline.mxnet."""

import importlib
import logging
import sys
from collections import OrderedDict

import numpy as np

mx = importlib.import_module(sys.argv[1])
folder = sys.argv[2]
schedule = sys.argv[3] if len(sys.argv) > 3 else None


def network():
    """The only part that differs beside the import."""
    if mx.__name__ == "mxnet":
        net = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.var("data")), name="fc1", num_hidden=32)
        net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), name="fc2", num_hidden=10)
        return mx.sym.SoftmaxOutput(net, name="softmax")
    from torch import nn

    layers = OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(784, 32), relu=nn.ReLU(), fc2=nn.Linear(32, 10))
    return nn.Sequential(layers)


def key(name):
    return name if mx.__name__ == "mxnet" else name.replace("_", ".")


logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
random = np.random.RandomState(0)
centers = random.rand(10, 1, 28, 28)
labels = random.randint(0, 10, 500)
images = (centers[labels] + 0.3 * random.randn(500, 1, 28, 28)).astype("float32")
start = {
    "fc1_weight": random.uniform(-0.05, 0.05, (32, 784)),
    "fc1_bias": np.zeros(32),
    "fc2_weight": random.uniform(-0.2, 0.2, (10, 32)),
    "fc2_bias": np.zeros(10),
}
train_iter = mx.io.NDArrayIter(images[:400], labels[:400], 64, label_name="softmax_label")
val_iter = mx.io.NDArrayIter(images[400:], labels[400:], 64)
optimizer_params = {"learning_rate": 0.05, "wd": 0.001}
if schedule is None:
    optimizer_params["momentum"] = 0.9
else:  # without momentum, which holds rates of earlier steps in MXNet
    name, _, options = schedule.partition(" ")
    optimizer_params["lr_scheduler"] = getattr(mx.lr_scheduler, name)(
        **{option: eval(value) for option, _, value in (one.partition("=") for one in options.split())}
    )
batches = []
mod = mx.mod.Module(symbol=network(), context=[mx.cpu(0), mx.cpu(1)], work_load_list=[3, 1])
mod.fit(
    train_iter,
    eval_data=val_iter,
    eval_metric=["acc", "ce"],
    num_epoch=3,
    kvstore="device",
    optimizer="sgd",
    optimizer_params=optimizer_params,
    arg_params={key(name): mx.nd.array(value) for name, value in start.items()},
    aux_params={},
    batch_end_callback=[mx.callback.Speedometer(64, 3), lambda param: batches.append((param.epoch, param.nbatch))],
    epoch_end_callback=mx.callback.do_checkpoint(f"{folder}/net"),
)
assert batches == [(epoch, batch) for epoch in range(3) for batch in range(7)]
scores = mod.score(val_iter, mx.metric.create(["acc", "ce", "top_k_accuracy", mx.metric.MSE()][:2]))
outputs = mod.predict(val_iter)
assert outputs.shape == (100, 10)
symbol, arg_params, aux_params = mx.model.load_checkpoint(f"{folder}/net", 3)
args, auxs = mod.get_params()
assert all((arg_params[name].asnumpy() == args[name].asnumpy()).all() for name in args)
weights = {name: args[key(name)].asnumpy() for name in start}
np.savez(f"{folder}/weights.npz", outputs=outputs.asnumpy(), scores=[value for _, value in scores], **weights)
