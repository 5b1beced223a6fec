"""Ray Tune trains a network for each learning rate on a cluster, and stops trials that are worse than the median.

On nodes with GPUs write {"gpu": 1} as the resources of a trial.
"""

import ray
import torch
from gangline import Module, cpu, create_network, gpu
from gangline.data import digits
from ray import tune
from ray.tune.schedulers import MedianStoppingRule


def train(parameters: dict) -> None:
    """Train on the GPUs that Ray gives to this trial, or on one CPU context."""
    contexts = [gpu(index) for index in range(len(ray.get_gpu_ids()))] or [cpu(0)]
    data, held_out, _ = digits((1, 28, 28), torch.float32, seed=0)
    module = Module(create_network("mlp"), torch.nn.CrossEntropyLoss(), contexts)

    def report(param) -> None:
        [(_, accuracy)] = param.eval_metric.get_name_value()
        tune.report({"accuracy": accuracy})

    module.fit(data, held_out, num_epoch=parameters["epochs"], batch_size=64, kvstore="local", eval_end_callback=report,
               optimizer_params={"learning_rate": parameters["learning_rate"], "momentum": 0.9})  # fmt: skip


def main(rates: tuple[float, ...] = (0.1, 0.01, 0.001), epochs: int = 5, cpus: float = 1, storage=None) -> dict:
    """Return the parameters of the best trial."""
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": cpus}),
        param_space={"learning_rate": tune.grid_search(list(rates)), "epochs": epochs},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=MedianStoppingRule()),
        run_config=tune.RunConfig(storage_path=storage, verbose=0),
    )
    return tuner.fit().get_best_result().config


if __name__ == "__main__":
    print(main())
