"""Keys above 2 GiB, in stores within a process and over a server."""

from __future__ import annotations

import sys

import psutil
import pytest

from tests.kvstore.test_launch import launch

CODE = """\
import sys, torch, gangline
with gangline.create(sys.argv[1]) as kv:
    value = torch.zeros((1 << 31) + 8, dtype=torch.uint8)
    kv.init("w", value)
    value[::4099] = 3
    value[-1] = 5
    kv.push("w", value)
    kv.pull("w", value.zero_())
    assert int(value[:-1:4099].min()) == int(value[:-1:4099].max()) == 3
    assert int(value[-1]) == 5
    assert int(value.count_nonzero()) == len(value[:-1:4099]) + 1
print("right", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["device", "dist_sync", "allreduce"])
def test_a_key_above_2_gib(name: str) -> None:
    if psutil.virtual_memory().available < 14 << 30:
        pytest.skip("less than 14 GiB of memory are free")
    servers = "1" if name == "dist_sync" else "0"
    with launch("-n", "1", "-s", servers, "--", sys.executable, "-c", CODE, name) as job:
        status, out, errors = job.end(250)
    assert (status, out) == (0, ["[worker 0] right"]), errors
