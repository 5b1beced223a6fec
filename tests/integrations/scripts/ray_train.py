"""Ray Train over backend gangline: DDP of two workers on one machine."""

import ray
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train() -> None:
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(dist.get_rank() + step))).mean().backward()
        optimizer.step()
    weights = [torch.empty(1, 4) for _ in range(2)]
    dist.all_gather(weights, next(model.parameters()).detach())
    if dist.get_rank() == 0:
        print(f"trained by {type(model).__name__} over {dist.get_backend()}, equal: {weights[0].equal(weights[1])}")


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    config = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    TorchTrainer(train, scaling_config=config, torch_config=TorchConfig(backend="gangline")).fit()
    ray.shutdown()
