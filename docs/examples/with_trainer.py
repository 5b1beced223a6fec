"""A perceptron learns handwritten digits in a plain torch loop; with_trainer.py is the same over gangline's stores."""

import os

import sklearn.datasets
import torch
from gangline import Trainer

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
digits = sklearn.datasets.load_digits()
images, labels = torch.from_numpy(digits.data / 16), torch.from_numpy(digits.target)
train, held_out = slice(0, 1437), slice(1437, None)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()
optimizer = Trainer(model, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, "allreduce" if size > 1 else "local")
for _ in range(3):
    for batch in torch.randperm(1437).split(64):
        own = batch[rank::size]  # what this process takes of each batch: alone, all of it
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[train][own]), labels[train][own])
        loss.backward()
        optimizer.step(len(own))

accuracy = (model(images[held_out]).argmax(1) == labels[held_out]).double().mean().item()
if rank == 0:
    print(f"Validation-accuracy={accuracy:.4f}")
