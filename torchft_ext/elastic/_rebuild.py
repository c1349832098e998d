"""Objects that are made anew for a view go on from what those before them held."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchft_ext.elastic._codec import Encoded
from torchft_ext.elastic._description import Description
from torchft_ext.elastic._loading import Leaves, load
from torchft_ext.elastic._shards import local_of
from torchft_ext.elastic._state import State
from torchft_ext.elastic._view import View

__all__ = ["rebuild"]


def rebuild(state: State, build: Callable[[View], object], view: View, *, keep: bool) -> None:
    """Call build() and put what it returns into the state. Does not communicate by itself.

    Args:
        state: whose objects are made anew.
        build: see steps().
        view: for build().
        keep: the new objects take over what the old ones held; else they keep what they have.

    Raises:
        ElasticError: a new object did not take the state of the old one.
    """
    old = dict(state.objects)
    held = state.encode() if keep else {}
    made = build(view)
    if isinstance(made, Mapping):
        state.put(**made)
    for name, encoded in held.items():
        if state.objects[name] is not old[name]:
            _take_over(state, name, encoded)


def _take_over(state: State, name: str, held: Encoded) -> None:
    """Parts of sharded tensors are put onto the mesh of the new objects."""
    described = Description.of({name: held}, hashed=False)
    parts = {path: local_of(tensor) for path, tensor in held.shards.items()}
    taken = {**held.tensors, **parts}
    load(state, name, held.data, Leaves.of(state).updated(taken, described.wholes))
