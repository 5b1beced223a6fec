"""A loop with MXNet's `Module`: `python mxnet_loop.py mxnet FOLDER`, or gangline.mxnet."""

import importlib
import sys
from collections import OrderedDict

import numpy as np

mx = importlib.import_module(sys.argv[1])
folder = sys.argv[2]


def network():
    """The only part that differs beside the import."""
    if mx.__name__ == "mxnet":
        net = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.var("data")), name="fc1", num_hidden=16)
        net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="tanh"), name="fc2", num_hidden=4)
        return mx.sym.SoftmaxOutput(net, name="softmax")
    from torch import nn

    layers = OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(64, 16), tanh=nn.Tanh(), fc2=nn.Linear(16, 4))
    return nn.Sequential(layers)


def key(name):
    return name if mx.__name__ == "mxnet" else name.replace("_", ".")


random = np.random.RandomState(1)
labels = random.randint(0, 4, 130)
images = (random.rand(4, 8, 8)[labels] + 0.2 * random.randn(130, 8, 8)).astype("float32")
start = {
    "fc1_weight": random.uniform(-0.1, 0.1, (16, 64)),
    "fc1_bias": np.zeros(16),
    "fc2_weight": random.uniform(-0.2, 0.2, (4, 16)),
    "fc2_bias": np.zeros(4),
}
data_iter = mx.io.NDArrayIter({"data": images}, {"softmax_label": labels}, batch_size=32)
mod = mx.mod.Module(network(), context=mx.cpu())
mod.bind(data_shapes=data_iter.provide_data, label_shapes=data_iter.provide_label, inputs_need_grad=True)
mod.init_params(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
mod.set_params({key(name): mx.nd.array(value) for name, value in start.items()}, {})
mod.init_optimizer(
    kvstore=mx.kv.create("local"), optimizer="sgd", optimizer_params=(("learning_rate", 0.05), ("momentum", 0.9))
)
metric = mx.metric.create("acc")
values = []
for _ in range(4):
    data_iter.reset()
    metric.reset()
    for batch in data_iter:
        mod.forward(batch, is_train=True)
        mod.update_metric(metric, batch.label)
        mod.backward()
        [gradient] = mod.get_input_grads()
        mod.update()
    name, value = metric.get()
    values.append(value)
assert (name, batch.pad) == ("accuracy", 30)
outputs = mod.get_outputs()[0]
assert outputs.shape == (32, 4)
mod.save_params(f"{folder}/net.params")
args, _ = mod.get_params()
weights = {name: args[key(name)].asnumpy() for name in start}
np.savez(
    f"{folder}/weights.npz",
    outputs=outputs.asnumpy(),
    gradient=gradient.asnumpy(),
    accuracy=values,
    **weights,
)
