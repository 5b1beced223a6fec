import json
import re

from typer.testing import CliRunner

from gangline.cli.main import app
from gangline.models.balance.speed_model import shortest_step, step_seconds


def planned(*words: str) -> list[dict[str, object]]:
    done = CliRunner().invoke(app, ["plan", *words, "--json", "-"])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def test_plan_compares_splits_by_speed() -> None:
    balanced, equal, without = planned("--speeds", "300,100", "--batch", "64", "--memory", "24,11")
    assert (balanced["counts"], equal["counts"], without["counts"]) == ([48, 16], [32, 32], [64, 0])
    assert (balanced["seconds"], equal["seconds"], balanced["times_equal"]) == (0.16, 0.32, 2)
    assert without["samples_per_s"] == 300
    assert (balanced["sample_memory_max"], equal["sample_memory_max"]) == (0.5, 11 / 32)


def test_the_table_fits_a_terminal_and_says_when_its_units_hold() -> None:
    words = ["--speeds", "3,1,1", "--batch", "64", "--memory", "24,11,8", "--sample-memory", "0.5"]
    done = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "80"})
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    assert [row[:3] for row in lines[:4]] == [
        ["split", "samples", "step in s"],
        ["balanced", "39, 13, 12", "13"],
        ["equal", "22, 21, 21", "out of memory"],
        ["without rank 1", "48, 0, 16", "16"],
    ]
    assert lines[4:] == [["Seconds and samples/s hold if --speeds are in samples per second."]]


def test_plan_keeps_within_memory() -> None:
    words = ["--speeds", "3,1", "--batch", "64", "--memory", "24,11", "--fixed-memory", "2", "--sample-memory"]
    balanced, equal, without = planned(*words, "0.3")
    assert (balanced["counts"], balanced["fits"]) == ([48, 16], True)
    assert (equal["fits"], without["fits"], without["split"]) == (False, True, "without rank 1")
    done = CliRunner().invoke(app, ["plan", *words, "0.5"])
    assert "hold at most rank 0: 44, rank 1: 18" in str(done.exception)


def test_the_split_with_caps_is_the_fastest_one() -> None:
    rates, fixed = [0.5, 2.0, 1.0], [0.1, 0.0, 3.0]
    for caps in ([None, None, None], [4, None, 2], [5, 3, None]):
        size, most = 9, [9 if cap is None else cap for cap in caps]
        counts = shortest_step(size, rates, caps, [0, 0, 0], fixed=fixed)
        every = [
            (a, b, size - a - b) for a in range(most[0] + 1) for b in range(most[1] + 1) if 0 <= size - a - b <= most[2]
        ]
        assert sum(counts) == size
        assert step_seconds(counts, rates, fixed) == min(step_seconds(split, rates, fixed) for split in every)


def test_wrong_usage_says_what_is_expected() -> None:
    for words, text in (
        (["--batch", "8", "--speeds", "3,0"], "expected a number above 0 for each rank"),
        (["--batch", "8", "--speeds", "3,1", "--memory", "24"], "--memory is '24', 1 number; expected 2"),
        (["--batch", "8", "--speeds", "3,1", "--sample-memory", "1"], "--sample-memory is given without --memory"),
    ):
        done = CliRunner().invoke(app, ["plan", *words])
        assert done.exit_code != 0
        assert text in str(done.exception)
