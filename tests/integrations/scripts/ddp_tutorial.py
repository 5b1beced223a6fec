"""The script of torch's tutorial on torchrun, with one more line."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  as in the tutorial
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import gangline


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, loads):
        self.model = DDP(model)
        self.train_data = train_data
        self.optimizer = optimizer
        if loads:
            self.train_data = gangline.balance(self.model, train_data, loads=loads)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--loads", type=float, nargs="*")
    arguments = parser.parse_args()
    init_process_group(backend="gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    dataset = MyTrainDataset(97)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_data = DataLoader(dataset, arguments.batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, train_data, optimizer, arguments.loads).train(max_epochs=3)
    if os.environ["RANK"] == "0":
        torch.save(model.state_dict(), arguments.output)
    destroy_process_group()


if __name__ == "__main__":
    main()
