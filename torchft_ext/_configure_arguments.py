"""The arguments of configure(), in torchft's two forms."""

from __future__ import annotations

from typing import NamedTuple

_SHORT = ("rank", "world_size")
_LONG = (
    "replica_id",
    "rank",
    "world_size",
    "quorum_id",
    "group_rank",
    "group_world_size",
    "global_ranks",
)


class Membership(NamedTuple):
    """What configure() was told, in either of its two forms."""

    rank: int
    world_size: int

    @classmethod
    def of(cls, args: tuple[object, ...], kwargs: dict[str, object]) -> Membership:
        """Tell the forms apart: the longer one begins with a replica's name."""
        named = "replica_id" in kwargs or (bool(args) and isinstance(args[0], str))
        names = _LONG if named else _SHORT
        if len(args) > len(names):
            raise TypeError(
                f"configure: expected store_addr and at most {', '.join(names)}; found "
                f"{len(args) - len(names)} arguments more"
            )
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names or name in given:
                why = "twice" if name in given else "which it does not know"
                raise TypeError(f"configure: expected {', '.join(names)}; found {name} {why}")
            given[name] = value
        return cls(_number("rank", given), _number("world_size", given))


def _number(name: str, given: dict[str, object]) -> int:
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        found = type(value).__name__ if name in given else "none"
        raise TypeError(f"configure: {name}: expected an int, found {found}")
    return value
