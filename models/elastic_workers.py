"""The workers of an elastic job; the store assigns each worker's share of a step."""

from __future__ import annotations

from collections.abc import Callable

from gangline.kvstore import KVStore
from gangline.models.workers import Workers


class ElasticWorkers(Workers):
    """The workers of an elastic job, seen from one of them.

    The others may leave, so this worker exchanges nothing with them but gradients and weights: `count` is 1, and calls
    that are collective elsewhere return this worker's own data. Worker 0, which stays until the end, logs, validates
    and writes files.
    """

    is_elastic = True

    def __init__(self, store: KVStore, num_contexts: int) -> None:
        """Join the job of a store."""
        super().__init__()
        self.rank = store.rank
        self.first_context = store.rank * num_contexts
        self.first_sample = 0
        """Index of this worker's first sample within the global batch."""
        self.store = store
        """Store of the job, which decides which workers take part in a step."""
        self._began_at = 0  # position of the job's first step

    @property
    def has_others(self) -> bool:
        """True, even if this is currently the only worker."""
        return True

    def begin(self, position: int, step: int, *, resumes: bool) -> tuple[int, int, bool]:
        """Begin to train. Collective; a worker that joins late gets the others' data and cannot call it again.

        Returns:
            The arguments of worker 0: global batches done over all epochs, training batches that its module has run,
            and whether a checkpoint is resumed. This worker begins the store's `first_step` after them; read that
            after all collective calls of `fit`.
        """
        self._began_at, step, resumes = self.store.group.broadcast([position, step, resumes], "fit")
        self.has_begun = True
        return self._began_at, step, resumes

    def share_of(self, position: int, samples: int) -> slice | None:
        """Begin a step, and return this worker's slice of its global batch; None if this worker has left the job.

        ``position`` is the number of the batch over all epochs.
        """
        share = self.store.share(samples, position - self._began_at)
        self.has_left = share is None
        self.first_sample = 0 if share is None else share.start
        return share

    def run_on_first(self, action: Callable[[], object], name: str) -> None:  # noqa: ARG002  inherited
        """Run an action if this is worker 0."""
        if self.is_first:
            action()

    def ask_to_stop(self, reason: str) -> None:
        """Ask to leave the job; worker 0 ends the job, because the others cannot continue without it."""
        if self.is_first:
            super().ask_to_stop(reason)
        elif self._stop_request is None:
            self.store.leave()
            self._stop_request = reason
