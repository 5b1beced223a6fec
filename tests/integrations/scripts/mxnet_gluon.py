"""Gluon's `Trainer` over a store of several workers: `python mxnet_gluon.py mxnet FOLDER`, or gangline.mxnet."""

import importlib
import os
import sys

import numpy as np

mx = importlib.import_module(sys.argv[1])
folder = sys.argv[2]
autograd, gluon = mx.autograd, mx.gluon


def network():
    """The only part that differs beside the import."""
    if mx.__name__ == "mxnet":
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(16, activation="relu", in_units=64), gluon.nn.Dense(4, in_units=16))
        return net
    from torch import nn

    return gluon.Block(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)))


random = np.random.RandomState(1)
labels = random.randint(0, 4, 128)
images = (random.rand(4, 8, 8)[labels] + 0.2 * random.randn(128, 8, 8)).astype("float32")
start = [random.uniform(-0.1, 0.1, (16, 64)), np.zeros(16), random.uniform(-0.2, 0.2, (4, 16)), np.zeros(4)]
net = network()
net.initialize(mx.init.Xavier(), ctx=mx.cpu())
parameters = list(net.collect_params().values())
for parameter, value in zip(parameters, start, strict=True):
    if mx.__name__ == "mxnet":
        parameter.set_data(mx.nd.array(value))
    else:
        parameter.data.copy_(mx.nd.array(value))
store = mx.kv.create("dist_sync" if "DMLC_ROLE" in os.environ else "local")
workers, rank = store.num_workers, store.rank
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, kvstore=store)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
losses = []
for _ in range(4):
    for begin in range(0, 128, 32):
        batch = slice(begin + rank, begin + 32, workers)
        data, label = mx.nd.array(images[batch]), mx.nd.array(labels[batch])
        with autograd.record():
            loss = loss_fn(net(data), label)
        loss.backward()
        trainer.step(32)
        losses.append(float(loss.mean().asscalar()))
assert losses[-1] < losses[0]
if rank == 0:
    is_mxnet = mx.__name__ == "mxnet"
    values = [one.data().asnumpy() if is_mxnet else one.detach().numpy() for one in parameters]
    np.savez(f"{folder}/weights.npz", losses=losses, **{str(number): value for number, value in enumerate(values)})
