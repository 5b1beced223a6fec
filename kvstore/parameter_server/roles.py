"""Start the role that the environment assigns to this process."""

from __future__ import annotations

import os


def serve_if_assigned() -> None:
    """Run the scheduler or server if DMLC_ROLE names one, then raise SystemExit; otherwise return at once.

    The imports are local because the scheduler must start without importing torch.
    """
    role = os.environ.get("DMLC_ROLE")
    if role == "scheduler":
        from gangline.kvstore.parameter_server.scheduler import scheduler

        raise SystemExit(scheduler.main())
    if role == "server":
        from gangline.kvstore.parameter_server.server import server

        raise SystemExit(server.main())
