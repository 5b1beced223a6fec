"""`gangline bench device-group`, small."""

from __future__ import annotations

import pytest

from gangline.bench.device_group import run

FIELDS = {"who", "collective", "transport", "size", "count", "dtype", "redop", "in_place", "registered", "time_us"}
FIELDS |= {"algbw_gbs", "busbw_gbs", "wrong", "contexts", "memory_gbs", "ratio_to_copy", "p50", "p99", "max", "runs"}


def test_each_way_on_the_host_stands_beside_copies_of_torch() -> None:
    rows = run({3: "cpu(0),cpu(1),cpu(2)"}, [4096, 8192], runs=2, run_seconds=0.0)
    assert [(row["transport"], row["collective"], row["size"]) for row in rows] == [
        (transport, collective, size)
        for size in (4096, 8192)
        for transport, collective in (
            ("torch", "copy_"),
            ("staged", "all_reduce"),
            ("staged", "broadcast"),
            ("copies", "all_reduce"),
            ("copies", "broadcast"),
            ("add_, copy_", "all_reduce"),
        )
    ]
    for row in rows:
        assert set(row) >= FIELDS
        assert (row["contexts"], row["devices"], row["count"], row["wrong"]) == (3, 1, row["size"] // 4, 0)
        assert row["time_us"] == row["p50"]
        assert row["algbw_gbs"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
    for row in rows[1::6]:
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 4 / 3)
        assert row["memory_gbs"] == pytest.approx(row["algbw_gbs"] * 6)
    assert {row["ratio_to_copy"] for row in rows[::6]} == {1.0}
