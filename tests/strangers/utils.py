"""Helpers that the scripts of this folder share, as the utils.py of a research repository."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset


def init_distributed(seed: int = 0) -> tuple[int, int]:
    """Join the job if a launcher started this process, seed torch, and return rank and world size."""
    torch.manual_seed(seed)
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    return dist.get_rank(), dist.get_world_size()


def noisy_classes(classes: int) -> TensorDataset:
    """Return 98 samples of 10 features about their class number."""
    labels = torch.randint(classes, (98,))
    return TensorDataset(torch.randn(98, 10) + labels[:, None], labels)


def wrap(model: nn.Module, **options: Any) -> nn.Module:
    """Wrap a network in a job: by FSDP2 if WRAPPER=fsdp2, else by DistributedDataParallel with these options."""
    if not dist.is_initialized():
        return model
    if os.environ.get("WRAPPER") != "fsdp2":
        return DistributedDataParallel(model, **options)
    for blocks in [layer for layer in model.modules() if isinstance(layer, nn.ModuleList | nn.Sequential)][:1]:
        for block in blocks:
            if any(True for _ in block.parameters()):
                fully_shard(block)
    return fully_shard(model)


def save(**models: nn.Module) -> None:
    """Save the weights to a file of this rank in the folder given on the command line, and leave the job."""
    state = {}
    for name, model in models.items():
        for key, value in model.state_dict().items():
            key = key.replace("module.", "").replace("_orig_mod.", "")
            state[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    torch.save(state, Path(sys.argv[1], f"{os.environ.get('RANK', 0)}.pt"))
    if dist.is_initialized():
        dist.destroy_process_group()
