"""The adapters that run tests of Horovod and MXNet on gangline, on tests in their style."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import ROOT, python

BOTH = ROOT / ".peers" / "mxnet-gangline" / "bin" / "python"
HOROVOD = """\
import os
import unittest
import torch
import horovod.torch as hvd
from common import mpi_env_rank_and_size, skip_or_fail_gpu_test, temppath

class TorchTests(unittest.TestCase):
    def setUp(self):
        hvd.init()

    def test_rank(self):
        self.assertEqual((hvd.rank(), hvd.size()), mpi_env_rank_and_size())

    def test_sum(self):
        with temppath() as path:
            torch.save(hvd.allreduce(torch.ones(3), op=hvd.Sum), path)
            self.assertEqual(torch.load(path).tolist(), [2, 2, 2])

    def test_mean_of_integers(self):
        odd = torch.IntTensor([-75, 75]) * hvd.rank()
        self.assertTrue(torch.equal(hvd.allreduce(odd), torch.IntTensor([-75, 75]).floor_divide(2)))

    def test_gpu(self):
        skip_or_fail_gpu_test(self, "No GPUs available")

    def test_names_of_2021(self):
        with self.assertRaises((torch.FatalError, RuntimeError)):
            hvd.allreduce(torch.ones(hvd.rank() + 1))

    def test_horovod_is_initialized(self):
        raise AssertionError("it runs in a process of its own")

    def test_horovod_join_allgather(self):
        os._exit(3)

    def test_broadcast_state_no_grad(self):
        self.assertEqual(hvd.rank(), 0)

    def test_optimizer_no_named_parameters(self):
        pass
"""
REPORTED = """\
Horovod, test/parallel/test_torch.py, 2 ranks: 5 passed, 1 skipped, 2 differ, 1 left out
  differs, and docs/conformance.md does not name it: test_horovod_is_initialized (failed)
  passes, and docs/conformance.md says that it differs: test_optimizer_no_named_parameters
"""

MXNET = """\
import mxnet as mx
import numpy as np

kv = mx.kv.create("dist_sync")
kv.set_optimizer(mx.optimizer.create("test", rescale_grad=2))
kv.init("w", [mx.nd.ones((4, 2), dtype="float16")])
gradient = mx.nd.zeros((4, 2), dtype="float16")
gradient[kv.rank] = 1
kv.push("w", gradient.tostype("row_sparse"))
rows = mx.nd.sparse.zeros("row_sparse", (4, 2))
kv.row_sparse_pull("w", out=rows, row_ids=mx.nd.array([1, 2]))
whole = mx.nd.zeros((4, 2), dtype="float16")
kv.pull("w", out=whole)
assert whole.asnumpy()[:, 0].tolist() == [3, 3, 1, 1], whole
assert rows.asnumpy()[:, 0].tolist() == [0, 3, 1, 0], rows
try:
    kv.pull("unknown", out=whole)
except mx.base.MXNetError as error:
    print(error)
"""


@pytest.mark.slow
def test_tests_of_horovod_run_and_those_that_the_page_does_not_name_must_pass(tmp_path: Path) -> None:
    (tmp_path / "test" / "parallel").mkdir(parents=True)
    (tmp_path / "test" / "parallel" / "test_torch.py").write_text(HOROVOD)
    done = python("-m", "tests.conformance.suites", "--horovod", tmp_path, code=1)
    assert done.stdout == REPORTED


@pytest.mark.slow
@pytest.mark.skipif(not BOTH.exists(), reason="it is not installed: make .peers/mxnet-gangline/.installed")
def test_a_test_of_mxnet_runs(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text(MXNET)
    launch = ("-m", "gangline", "launch", "-n", 2, "-s", 1, "--", BOTH)
    done = python(*launch, "-m", "tests.conformance.mxnet_stores", tmp_path / "store.py", code=0)
    assert done.stdout.count("'unknown' was not initialised") == 2, done.stdout
