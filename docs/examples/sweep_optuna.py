"""Optuna chooses learning rates, and stops trials whose accuracy is below the median of the others' at the same epoch.

Each context trains one network at a time.
"""

from queue import SimpleQueue

import optuna
import torch
from gangline import Module, cpu, create_network
from gangline.data import digits


def main(num_trials: int = 16, num_epochs: int = 5) -> optuna.Study:
    """Return the study after all trials."""
    contexts = SimpleQueue()
    for context in (cpu(0), cpu(1)):
        contexts.put(context)
    data, held_out, _ = digits((1, 28, 28), torch.float32, seed=0)

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("learning_rate", 1e-4, 1, log=True)

        def report(param) -> None:
            [(_, accuracy)] = param.eval_metric.get_name_value()
            trial.report(accuracy, param.epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        context = contexts.get()
        module = Module(create_network("mlp"), torch.nn.CrossEntropyLoss(), context)
        try:
            module.fit(data, held_out, num_epoch=num_epochs, batch_size=64, kvstore="local", eval_end_callback=report,
                       optimizer_params={"learning_rate": rate, "momentum": 0.9})  # fmt: skip
            [(_, accuracy)] = module.score(held_out, "acc", batch_size=64)
        finally:
            module.close()
            contexts.put(context)
        return accuracy

    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=3))
    study.optimize(objective, n_trials=num_trials, n_jobs=contexts.qsize())
    return study


if __name__ == "__main__":
    found = main()
    print(found.best_params, found.best_value)
