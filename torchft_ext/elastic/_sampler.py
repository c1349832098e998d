"""Batches that follow the world size, without a sample missed or taken twice."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from torchft_ext.elastic._random import mixed

__all__ = ["BatchSampler", "Loader"]

_OURS = frozenset({"batch_size", "batch_sampler", "drop_last", "sampler", "shuffle"})


class BatchSampler(Sampler[list[int]]):
    """Give each rank its batch of the next step, from one permutation of the data for each pass.

    A step's global batch are the next ``size * micro_batches * batch_size`` indices from the cursor
    on; rank r takes the r-th part, one micro-batch after the other. The tail of a pass runs on into
    the next pass's permutation, so that all batches are full. The cursor counts samples and moves
    by commit() only: whatever happens to the world between two commits, no sample of a committed
    step is missed or taken twice.

    Put it into State(): then steps() calls follow(), commit() and rewind(), and newcomers get the
    cursor. The user makes and owns it; torch's DataLoader takes it as ``batch_sampler=``. Threads:
    one at a time. It never communicates, and never touches torch's global random state.

    Source: torch.utils.data.BatchSampler over a DistributedSampler. Different on purpose: iterating
    never ends, nothing is dropped or padded, and there is no set_epoch().
    """

    def __init__(
        self,
        data_source: Sized | int,
        batch_size: int,
        *,
        micro_batches: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Make the sampler of a world of one; follow() says which.

        Args:
            data_source: a map-style dataset, or how many samples there are; the same on all ranks.
            batch_size: samples of one rank in one batch.
            micro_batches: how many batches one rank takes in one step: more than one where it
                accumulates gradients.
            seed: of the permutations; the same on all ranks.
            shuffle: False: every pass goes through the data in order.

        Raises:
            ValueError: there are no samples, or `batch_size` or `micro_batches` is below 1.
        """
        self.data_source = data_source
        self.seed = seed
        self.shuffle = shuffle
        self._length = data_source if isinstance(data_source, int) else len(data_source)
        if self._length < 1:
            raise ValueError(f"BatchSampler: data_source: no samples, found {self._length}")
        self._rank, self._size = 0, 1
        self._position = 0
        self._resets = 0
        self._given = 0  # batches of the step that is not committed yet
        self._permutations: dict[int, torch.Tensor] = {}  # by pass; at most two
        self._batch_size = self._micro_batches = 0
        self.batch_size = batch_size
        self.micro_batches = micro_batches

    @property
    def batch_size(self) -> int:
        """Samples of one rank in one batch. Set it at a boundary between steps, on all ranks."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._batch_size = _at_least_one("batch_size", value)
        self._resets += 1

    @property
    def micro_batches(self) -> int:
        """Batches of one rank in one step. Set it at a boundary between steps, on all ranks."""
        return self._micro_batches

    @micro_batches.setter
    def micro_batches(self, value: int) -> None:
        self._micro_batches = _at_least_one("micro_batches", value)
        self._resets += 1

    @property
    def rank(self) -> int:
        """Whose part it takes."""
        return self._rank

    @property
    def size(self) -> int:
        """Of the world among whose ranks a global batch is divided."""
        return self._size

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in one step."""
        return self._size * self._of_rank

    @property
    def _of_rank(self) -> int:
        """Samples of one rank in one step."""
        return self._micro_batches * self._batch_size

    @property
    def position(self) -> int:
        """Samples in committed steps, over all passes."""
        return self._position

    @property
    def pass_(self) -> int:
        """The number of the pass that the next step begins in; the first is 0."""
        return self._position // self._length

    @property
    def epoch(self) -> int:
        """The same as `pass_`, by torch's word."""
        return self.pass_

    @property
    def passes_after_step(self) -> int:
        """Passes that are complete once the step that is not committed yet counts."""
        return (self._position + self.global_batch_size) // self._length

    @property
    def cursor(self) -> int:
        """Samples of this pass that committed steps took."""
        return self._position % self._length

    @property
    def resets(self) -> int:
        """Another number than before: batches that were drawn from an iterator are stale."""
        return self._resets

    def __len__(self) -> int:
        """Return how many steps of the present world size one pass takes, rounded up."""
        return -(-self._length // self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of successive steps, from the cursor on, for ever; of each step
        `micro_batches`.

        What it yields follows neither follow() nor a repeated step: begin another iteration when
        `resets` has changed. loader() does.
        """
        begin, stride = self._position + self._rank * self._of_rank, self.global_batch_size
        batch_size, micro_batches = self._batch_size, self._micro_batches
        while True:
            for micro in range(micro_batches):
                yield self._take(begin + micro * batch_size, batch_size)
            begin += stride

    def indices(self) -> list[int]:
        """Return this rank's samples of the step that is not committed yet; repeatable."""
        return self._take(self._position + self._rank * self._of_rank, self._of_rank)

    def follow(self, rank: int, size: int) -> None:
        """Take the part of this rank of this world, from the next batch on.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < size:
            raise ValueError(f"BatchSampler.follow: rank: expected 0 to {size - 1}, found {rank}")
        if (rank, size) != (self._rank, self._size):
            self._rank, self._size = rank, size
            self._resets += 1

    def commit(self) -> None:
        """Move the cursor past the global batch of the step: it counts."""
        self._position += self.global_batch_size
        self._given = 0

    def rewind(self) -> None:
        """Say that the step begins again: batches that were drawn for it are stale."""
        self._resets += 1
        self._given = 0

    def note_given(self, batches: int) -> None:
        """Say how many of this rank's batches of the step a loader has given; it calls this."""
        self._given = max(self._given, batches)

    def check_given(self) -> None:
        """Refuse to commit a step that took some of its batches: the others would be missed.

        Raises:
            RuntimeError: that is so.
        """
        if 0 < self._given < self._micro_batches:
            raise RuntimeError(
                f"BatchSampler: this step took {self._given} of its {self._micro_batches} "
                "micro-batches, and the others would be missed: take all, or give a smaller "
                "micro_batches="
            )

    def loader(self, dataset: Dataset[Any] | None = None, **options: Any) -> Loader:
        """Make an iterator over batches of data that stays in step with this sampler.

        Args:
            dataset: map-style; None: the `data_source`.
            options: of torch's DataLoader, such as ``num_workers=2``; those that choose samples
                are this sampler's.
        """
        return Loader(self, dataset, options)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position, and what the permutations depend on; the world is not in it."""
        return {
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self._length,
        }

    def load_state_dict(self, state_dict: dict[str, int | bool]) -> None:
        """Go on from a position, in a world of whatever size.

        Raises:
            ValueError: it is that of other data.
        """
        length = state_dict["length"]
        if length != self._length:
            raise ValueError(
                f"BatchSampler.load_state_dict: expected the state of {self._length} samples, "
                f"found that of {length}"
            )
        self._position = int(state_dict["position"])
        self.seed = int(state_dict["seed"])
        self.shuffle = bool(state_dict["shuffle"])
        self._permutations.clear()
        self._resets += 1

    def _take(self, start: int, count: int) -> list[int]:
        """The samples at these positions; passes follow one another."""
        taken: list[int] = []
        while len(taken) < count:
            pass_, offset = divmod(start + len(taken), self._length)
            end = min(self._length, offset + count - len(taken))
            taken += self._part(pass_, offset, end)
        return taken

    def _part(self, pass_: int, begin: int, end: int) -> list[int]:
        if not self.shuffle:
            return list(range(begin, end))
        part: list[int] = self._permutation(pass_)[begin:end].tolist()
        return part

    def _permutation(self, pass_: int) -> torch.Tensor:
        """`[length]`, int64; kept for this pass and the one before."""
        if pass_ not in self._permutations:
            generator = torch.Generator().manual_seed(mixed(self.seed, pass_))
            made = torch.randperm(self._length, generator=generator)
            last = dict(list(self._permutations.items())[-1:])
            self._permutations = {**last, pass_: made}
        return self._permutations[pass_]


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"BatchSampler: {name}: expected at least 1, found {value}")
    return value


class Loader(Iterator[Any]):
    """Batches of data by a DataLoader; next() gives one of the step that is not committed yet.

    A step has `micro_batches` of the sampler, one by default. When the sampler was reset (another
    view, a repeated step, a loaded state), what workers have prefetched is thrown away, and the
    step's batches are read anew. BatchSampler.loader() makes it, the user owns it. Threads: one at
    a time. Its worker processes end with it; by default they live on through resets
    (``persistent_workers``).

    Workers that start are seeded from the sampler's seed and position and from the rank, where no
    `generator` is given, and draw on through resets: a batch that is read anew has the same
    samples, and other random numbers. torch's global random state is left alone.
    """

    def __init__(
        self, sampler: BatchSampler, dataset: Dataset[Any] | None, options: dict[str, Any]
    ) -> None:
        """See BatchSampler.loader()."""
        if taken := sorted(_OURS & options.keys()):
            raise TypeError(f"BatchSampler.loader: {', '.join(taken)}: the sampler decides that")
        if dataset is None and isinstance(sampler.data_source, int):
            raise TypeError("BatchSampler.loader: dataset: the sampler knows only its length")
        options.setdefault("persistent_workers", options.get("num_workers", 0) > 0)
        self._sampler = sampler
        self._generator: torch.Generator | None = None
        if options.get("generator") is None:
            self._generator = options["generator"] = torch.Generator()
        source: Any = sampler.data_source if dataset is None else dataset
        self._loader: DataLoader[Any] = DataLoader(source, batch_sampler=sampler, **options)
        self._batches: Iterator[Any] = iter(())
        self._resets = -1  # the sampler's when the iterator was begun
        self._position = 0  # of the step whose batches it gives
        self._taken = 0  # of these

    def __next__(self) -> Any:
        """Return the next batch of the step that is not committed yet; may wait for workers.

        Raises:
            RuntimeError: the step has no more.
        """
        self._find_step()
        if self._taken == self._sampler.micro_batches:
            raise RuntimeError(
                f"BatchSampler.loader: all batches of this step have been taken, {self._taken}: "
                "keep one that is needed twice; to accumulate gradients of n batches in a step, "
                "give BatchSampler(..., micro_batches=n)"
            )
        batch = next(self._batches)
        self._taken += 1
        self._sampler.note_given(self._taken)
        return batch

    def _find_step(self) -> None:
        """Begin anew where the iterator's next batch is none of the step's."""
        sampler = self._sampler
        if self._resets != sampler.resets:
            self._begin(sampler.position)
        elif self._position != sampler.position:
            whole = self._taken == sampler.micro_batches
            if not whole or sampler.position != self._position + sampler.global_batch_size:
                self._begin(sampler.position)
            self._position, self._taken = sampler.position, 0

    def _begin(self, position: int) -> None:
        self._position, self._taken = position, 0
        self._resets = self._sampler.resets
        if self._generator is not None:
            self._generator.manual_seed(mixed(self._sampler.seed, position, self._sampler.rank))
        self._batches = iter(self._loader)
