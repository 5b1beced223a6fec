"""A perceptron learns handwritten digits in a plain torch loop; with_trainer.py is the same over gangline's stores."""

import os

import gangline
import torch
from torch.optim import SGD

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
(images, labels), (held_out, held_out_labels), _ = gangline.data.digits((1, 8, 8), torch.float64)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
).double()
optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    for batch in torch.randperm(len(images)).split(64):
        own = batch[rank::size]  # share of this process; all of the batch if there is one process
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[own]), labels[own])
        loss.backward()
        optimizer.step()

accuracy = (model(held_out).argmax(1) == held_out_labels).double().mean().item()
if rank == 0:
    print(f"Validation-accuracy={accuracy:.4f}")
