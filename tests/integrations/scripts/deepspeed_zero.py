"""A DeepSpeed loop with accumulation and ZeRO, with one more line."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--loads", type=float, nargs="*")
    parser.add_argument("--stage", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(160, 20), torch.randn(160, 5))
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch_size,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": arguments.stage},
    }
    model, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    loader = DataLoader(dataset, arguments.batch_size)
    if arguments.loads:
        loader = gangline.balance(model, loader, loads=arguments.loads)
    for _ in range(2):
        for inputs, labels in loader:
            loss = nn.functional.mse_loss(model(inputs), labels)
            model.backward(loss)
            model.step()
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        if model.global_rank == 0:
            torch.save({name: value.clone() for name, value in net.state_dict().items()}, arguments.output)
    model.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
