"""`gangline bench local-steps`: training over slow links, by DistributedDataParallel and by `gangline.LocalSteps`.

Each worker is on a host of its own, which is a network namespace with a link that tc slows down; servers of dist_sync
are beside the workers, one on each host. The score is that of the model after equally many samples: accuracy on 360
held-out images for digits; for text the loss of a small language model on held-out characters.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from gangline.bench.driver.harness import say
from gangline.bench.driver.hosts import Hosts, obstacle
from gangline.bench.driver.processes import SERVER, Candidate
from gangline.bench.driver.rank_group import RankGroup
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row
from gangline.bench.workload.options import Json
from gangline.bench.workload.sizes import counts
from gangline.usage_error import UsageError

_DDP = "DDP, gloo"


def _ways(every: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return servers per worker and options of LocalSteps by row."""
    bf16, two_bit = {"compression": {"type": "bf16"}}, {"compression": {"type": "2bit", "threshold": 0.003}}
    return {
        _DDP: (0, {}),
        "allreduce, one fragment": (0, {"every": every, "fragments": 1}),
        "allreduce, bf16": (0, {"every": every, **bf16}),
        "allreduce, 2bit": (0, {"every": every, **two_bit}),
        "allreduce, bf16, auto": (0, {"every": "auto", **bf16}),
        "dist_sync, bf16": (1, {"every": every, "compression": {"type": "bf16", "pull_type": "bf16"}}),
    }


def local_steps(
    tasks: Annotated[str, typer.Option(help="Tasks with commas: digits, text.")] = "digits,text",
    workers: Annotated[str, typer.Option("-n", "--workers", help="Numbers of workers, with commas.")] = "2,4",
    batch_size: Annotated[int, typer.Option(help="Samples in a batch of each worker.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Steps of each worker.", min=10)] = 300,
    every: Annotated[int, typer.Option(help="Local steps in a cycle.", min=1)] = 50,
    rate: Annotated[str, typer.Option(help="Rate of each link, in tc's notation.")] = "100mbit",
    round_trip: Annotated[float, typer.Option(help="Round trip between two hosts, in ms.", min=0)] = 20.0,
    slower: Annotated[int, typer.Option(help="Factor by which the last worker is slower.", min=1)] = 1,
    only: Annotated[str, typer.Option(help="Regular expression of the rows to measure; DDP always has one.")] = "",
    json: Json = None,
) -> None:
    """Train once in each way; samples/s include the last exchange. With --slower the others make more steps."""
    check_outputs(json)
    if (why := obstacle()) is not None:
        raise UsageError(why)
    rows: list[Row] = []
    for number in counts(workers, "--workers"):
        for task in tasks.split(","):
            for who, (servers, options) in _ways(every).items():
                if who != _DDP and not re.search(only, who):
                    continue
                candidate = Candidate(
                    "local_steps",
                    number,
                    number * servers,
                    {
                        "GANGLINE_INSECURE": "1",  # the namespaces are isolated
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "OMP_NUM_THREADS": "1",
                        **({"BENCH_BACKEND": "gloo"} if who == _DDP else {}),
                    },
                    server_code=SERVER,
                    is_spread=True,
                )
                own = [steps] * number
                if who != _DDP:  # the same samples in all, by speed
                    whole = steps * number * slower // ((number - 1) * slower + 1)
                    own = [*[whole] * (number - 1), steps * number - whole * (number - 1)]
                case = {"task": task, "batch_size": batch_size, "steps": own, "options": options}
                case["delays"] = [*[0] * (number - 1), slower - 1]
                with Hosts(number, rate=rate, delay=round_trip / 2000) as hosts, RankGroup(candidate, hosts) as group:
                    group.prepare(case)
                    speed = steps * number * batch_size / group.seconds(1, warmup=0)
                    reports = group.report()
                say(f"{task}, {number} workers, {who}: {speed:.1f} samples/s, score {reports[0]['score']:.4f}")
                same = [row for row in rows if (row["workers"], row["task"]) == (number, task)]
                ddp = float(str(same[0]["samples_per_s"])) if same and same[0]["who"] == _DDP else None
                rows.append(
                    {
                        "who": who,
                        "task": task,
                        "workers": number,
                        "every": ":".join(str(report["every"]) for report in reports),
                        "samples": steps * number * batch_size,
                        "samples_per_s": speed,
                        "times_ddp": speed / ddp if ddp else None,
                        "score": float(reports[0]["score"]),
                    }
                )
    publish(rows, json)
