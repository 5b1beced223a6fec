"""Global batches of an elastic job: every sample once per epoch, for any workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gangline.kvstore import KVStore
from gangline.models.arguments import check_int
from gangline.models.data.sources import BatchOrder


class ElasticBatches:
    """Indices of this worker's share of each global batch, for loops over a store whose workers may change.

    An epoch is a permutation of all samples by (seed, epoch), cut into global batches; each is split over the workers
    that take part in its step (`KVStore.share`). So the global batches do not depend on the number of workers. A worker
    that joins late begins at its first step. The loop ends for a worker that leaves.

    Each iteration yields a tensor of indices, which is empty if there are fewer samples than workers. In each step the
    loop must push every key once, with the number of indices as the weight of the gradients, and pull:

        kv = trainer.kvstore
        for indices in gangline.data.ElasticBatches(len(data), 64, kv, epochs=10):
            trainer.zero_grad()
            if len(indices):
                loss_function(model(data[indices]), label[indices]).backward()
            trainer.step(len(indices))

    Attributes:
        epoch: epoch of the last batch, from 0.
        step: number of the last batch, from 0, over all epochs.
    """

    def __init__(
        self, samples: int, global_batch: int, kvstore: KVStore, *, epochs: int = 1, shuffle: bool = True, seed: int = 0
    ) -> None:
        """Split epochs into global batches.

        Args:
            samples: number of samples in an epoch.
            global_batch: samples in a batch of all workers; the last one of an epoch may have fewer.
            kvstore: store that the loop pushes to; keys and optimizer must be set.
            epochs: number of epochs.
            shuffle: permute the samples in each epoch.
            seed: seed of the permutations.

        Raises:
            ValueError: if a number is below 1.
        """
        for name, number in (("samples", samples), ("global_batch", global_batch), ("epochs", epochs)):
            check_int(name, number)
        self._order = BatchOrder(samples, global_batch, shuffle, seed)
        self._kvstore = kvstore
        self._epochs = epochs
        self.epoch = 0
        self.step = 0

    def __len__(self) -> int:
        """Return the number of steps of all epochs."""
        return self._epochs * len(self._order)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the shares from the first step of this worker on."""
        batches: list[torch.Tensor] = []
        for step in range(self._kvstore.first_step, len(self)):
            self.step, epoch = step, step // len(self._order)
            if not batches or epoch != self.epoch:
                self.epoch, batches = epoch, self._order(epoch)
            number = step % len(self._order)
            share = self._kvstore.share(len(batches[number]), step)
            if share is None:
                return
            yield batches[number][share]
