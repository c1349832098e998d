"""When a training run is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchft_ext.elastic._state import State

__all__ = ["Goal"]


@dataclass(frozen=True)
class Goal:
    """How long a run goes on; the same on all members.

    Attributes:
        total: steps; None: `passes` says it.
        passes: over the data, by the state's only BatchSampler; None: `total` says it.
    """

    total: int | None = None
    passes: int | None = None

    @classmethod
    def of(cls, state: State, total: int | None, passes: int | None) -> Goal:
        """Check what steps() was given.

        Raises:
            ValueError: both were given, or none; or passes, and the state has not one BatchSampler.
        """
        if (total is None) == (passes is None):
            raise ValueError("steps: expected total= or passes=, and not both")
        if passes is not None and state.sampler is None:
            raise ValueError("steps: passes: expected one BatchSampler in the state")
        return cls(total, passes)

    def is_reached(self, state: State) -> bool:
        """Return whether nothing is left to do, by what is committed in this state."""
        if self.total is not None:
            return state.step >= self.total
        return state.sampler is not None and state.sampler.pass_ >= self._passes

    def is_reached_by_step(self, state: State) -> bool:
        """Return the same, once the step that is not committed yet is."""
        if self.total is not None:
            return state.step + 1 >= self.total
        return state.sampler is not None and state.sampler.passes_after_step >= self._passes

    def values(self) -> Iterator[tuple[str, object]]:
        """Yield what members compare, by name."""
        yield ("total", self.total) if self.total is not None else ("passes", self.passes)

    @property
    def _passes(self) -> int:
        assert self.passes is not None
        return self.passes
