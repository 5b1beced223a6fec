"""`gangline check`: prove that a job can run here, and say what to do where it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from gangline.cli.options import JsonFile, write_json
from gangline.collectives.bootstrap.launcher_environment import find_rank_info
from gangline.doctor.finding import Check, Finding, Status, finding_of, findings_of, run
from gangline.doctor.this_host import CHECKS, HOST_STEPS, check_host
from gangline.usage_error import UsageError

_JOB = "job"


def check(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this check only; repeatable. A wrong name lists all.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Deadline of each check, and for ranks to join.")
    ] = 30.0,
    json: JsonFile = None,
) -> None:
    """Check that a job can run: shared memory, limits, names, ports, links between hosts, GPUs.

    Started by a launcher on the hosts of a job, it also measures the links between them, and rank 0 prints. Each check
    runs in a process of its own, which is killed at its deadline. The exit code is 1 if a job could not run.
    """
    names = _chosen([*(one.name for one in CHECKS), _JOB], only)
    findings: list[Finding] = []
    links: list[object] = []
    is_silent = False
    rank, size, problem = _place()
    if _JOB in names and problem:
        findings.append(Finding(Status.BROKEN, _JOB, problem, "`gangline env` shows what was found"))
    elif _JOB in names and size > 1:
        one = Check(_JOB, "job", "job", "the output of the other ranks names the rank that does not answer")
        # ranks join, check their hosts, measure links, reduce
        (outcome,) = run([one], 2 * HOST_STEPS * timeout, {"seconds": timeout, "names": names})
        if outcome.problem:
            findings += findings_of(one, outcome)
        else:
            findings += map(finding_of, outcome.value["findings"])
            links = outcome.value["links"]
            is_silent = outcome.value["has_joined"] and rank != 0
            names = [] if outcome.value["has_joined"] else names  # each host has run them
    elif _JOB in names and only:
        how = "start it on the hosts of a job: gangline launch -n 2 -- gangline check"
        findings.append(Finding(Status.SKIPPED, "links between hosts", "this process was started alone", how))
    findings = [*check_host(names, timeout), *findings]
    if not is_silent:
        write_json(json, {"findings": [asdict(finding) for finding in findings], "links": links})
        if json is None:
            print("\n".join(_lines(findings)))
    raise typer.Exit(int(any(finding.status == Status.BROKEN for finding in findings)))


def _chosen(names: list[str], only: list[str] | None) -> list[str]:
    unknown = [name for name in only or () if name not in names]
    if unknown:
        raise UsageError(f"--only is {unknown[0]!r}; expected one of {', '.join(names)}")
    return only or names


def _place() -> tuple[int, int, str]:
    """Return this process's rank and job size, 0 and 1 without a launcher, and what is wrong with its variables."""
    try:
        info = find_rank_info(None, None, None, os.environ)
    except RuntimeError:
        return 0, 1, ""
    except ValueError as error:
        return 0, 1, str(error)
    return info.rank, info.size, ""


def _lines(findings: Iterable[Finding]) -> list[str]:
    """Return the report: a line for each finding, and below it what to do."""
    rows = [(finding, f"{finding.host}: {finding.name}" if finding.host else finding.name) for finding in findings]
    width = max((len(name) for _, name in rows), default=0)
    lines = []
    for finding, name in rows:
        lines.append(f"{finding.status:<8} {name:<{width}}  {finding.measured}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    return lines
