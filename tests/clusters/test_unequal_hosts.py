"""Workers of unequal speed on two hosts: loads follow the measured speed, weights are those of one process."""

from __future__ import annotations

import pytest
import torch

from tests.clusters.host_program import OPTIMIZER, problem
from tests.clusters.unequal_hosts import deviation, job, obstacle

BATCH, BATCHES = 40, 6
QUOTAS = (0.45, 0.15, 0.15)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_measured_loads_are_those_of_the_quotas_and_the_weights_those_of_one_process() -> None:
    with job("auto", QUOTAS) as group:
        group.prepare({"loads": None, "batch_size": BATCH, "batches": BATCHES})
        group.seconds(3, warmup=0)
        reports = group.report()
    loads = reports[0]["loads"]
    assert all(report["loads"] == loads for report in reports)
    expected = [quota / sum(QUOTAS) for quota in QUOTAS]
    assert [load / sum(loads) for load in loads] == pytest.approx(expected, abs=0.1)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = weights_of_one_process(len(reports[0]["epochs"]))
    finally:
        torch.set_num_threads(threads)
    assert max(deviation(report["weights"], alone) for report in reports) < 1e-9


def weights_of_one_process(epochs: int) -> dict[str, list[float]]:
    module, data = problem(BATCH, BATCHES)
    with module:
        module.init_optimizer(None, "sgd", OPTIMIZER)
        module.fit(data, batch_size=BATCH, num_epoch=epochs)
        return {name: value.flatten().tolist() for name, value in module.get_params().items()}
