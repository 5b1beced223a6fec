"""A plain FSDP2 script with accumulation, with one more line."""

import argparse
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gangline


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--loads", type=float, nargs="*")
    arguments = parser.parse_args()
    init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (65, 12))
    dataset = TensorDataset(tokens)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(50, 16), *layers, nn.Linear(16, 50), nn.LogSoftmax(-1))
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, arguments.batch_size, sampler=sampler)
    if arguments.loads:
        loader = gangline.balance(model, loader, loads=arguments.loads)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (ids,) in enumerate(loader):
            is_last = step % 2 == 1 or step == len(loader) - 1
            model.set_requires_gradient_sync(is_last)
            logits = model(ids)
            nn.functional.nll_loss(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if os.environ["RANK"] == "0":
        torch.save(state, arguments.output)
    destroy_process_group()


if __name__ == "__main__":
    main()
