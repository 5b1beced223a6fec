"""Serve the status of this user's gangline processes on this host as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from gangline.status.late import late_processes
from gangline.status.query import statuses
from gangline.usage_error import UsageError

_LABELS = ("job", "host", "process")


def serve_metrics(address: str) -> int:
    """Serve metrics at [HOST:]PORT in a thread; each request asks all processes. Return the port.

    The host is 127.0.0.1 unless given, the port any free one if 0.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"the address of metrics is {address!r}; expected PORT or HOST:PORT with a port up to 65535")
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise UsageError("metrics need prometheus-client: pip install 'gangline[metrics]'") from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    try:
        server, _ = start_http_server(int(port), host or "127.0.0.1", registry)
    except OSError as error:
        raise UsageError(f"metrics cannot be served at {address}: {error.strerror}; choose another port") from error
    return int(server.server_port)


class _Collector:
    """Asks the processes at each scrape."""

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of all processes."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        up = GaugeMetricFamily("gangline_up", "1 if the process answers, 0 if not.", labels=_LABELS)
        cpu = CounterMetricFamily("gangline_cpu_seconds", "Seconds that the threads have run.", labels=_LABELS)
        memory = GaugeMetricFamily("gangline_memory_bytes", "Bytes of resident memory.", labels=_LABELS)
        waits = GaugeMetricFamily(
            "gangline_waiting_seconds", "Seconds for which the process has waited.", labels=[*_LABELS, "part"]
        )
        late = GaugeMetricFamily(
            "gangline_late_seconds", "Seconds for which others have waited for the process.", labels=_LABELS
        )
        counters: dict[str, CounterMetricFamily] = {}
        for _, group in groupby(statuses(), key=lambda one: one.job):
            processes = list(group)
            awaited = {one.name: one.seconds for one in late_processes(processes)}
            for one in processes:
                labels = [one.job, one.host, one.name]
                up.add_metric(labels, float(one.answers))
                cpu.add_metric(labels, one.cpu_seconds)
                memory.add_metric(labels, one.memory_bytes)
                late.add_metric(labels, awaited.get(one.name, 0.0))
                for part in one.parts:
                    kind = part["part"]
                    longest = max((wait["seconds"] for wait in part["waits"]), default=0.0)
                    waits.add_metric([*labels, f"{kind}{part.get('group', '')}"], longest)
                    for name, value in part["counters"].items():
                        metric = f"gangline_{kind}_{name}"
                        known = counters.setdefault(
                            metric, CounterMetricFamily(metric, f"{name} of a {kind}.", labels=[*_LABELS, "group"])
                        )
                        known.add_metric([*labels, part.get("group", "")], value)
        yield from (up, cpu, memory, waits, late, *counters.values())
