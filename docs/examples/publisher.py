"""Train on handwritten digits with a server, and publish a version of the weights every ten steps.

gangline launch -n 2 -s 1 -- python publisher.py
"""

import gangline
import torch
from torch import nn

STEPS = 60


def make_network() -> nn.Module:
    """Return the network, whose initial weights are always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def main() -> None:
    """Train."""
    (images, labels), _, _ = gangline.data.digits((1, 8, 8), torch.float32)
    network = make_network()
    trainer = gangline.Trainer(network, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, "dist_sync")
    kv = trainer.kvstore
    for step in range(STEPS):
        own = torch.arange(64 * step, 64 * step + 64)[kv.rank :: kv.num_workers] % len(images)
        trainer.zero_grad()
        trainer.backward(nn.functional.cross_entropy(network(images[own]), labels[own]), len(own))
        trainer.step(len(own))
        if kv.rank == 0 and step % 10 == 9:
            kv.publish(step + 1, dict(network.named_buffers()))  # with the statistics of BatchNorm
    kv.close()


if __name__ == "__main__":
    main()
