"""Which plain value a value of a subclass, or a scalar of numpy, equals.

numpy may not be installed: a process that has not imported it has no scalars of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["FACTORIES", "narrow_float", "number_of", "plain"]

# Of defaultdicts, by the name with which they travel: calling one runs no code of others.
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict)},
}
_NARROW = ("float16", "float32")


def plain(value: object) -> object:
    """Return the plain value that this one equals; itself where there is none.

    An IntEnum gives its int, numpy.float64 a float, a tuple one of plain values.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    kind = _kind_of_scalar(value)
    if kind == "b":
        return bool(value)
    return int(value) if kind in ("i", "u") else value  # type: ignore[call-overload]


def narrow_float(value: object) -> tuple[str, bytes] | None:
    """Return the name and the bytes of a float16 or float32 of numpy; None for other values.

    These must not become floats: a survivor would go on in their arithmetic, and a newcomer in
    double precision.
    """
    if _kind_of_scalar(value) != "f":
        return None
    scalar: Any = value
    little = scalar.dtype.newbyteorder("<")
    return (scalar.dtype.name, scalar.astype(little).tobytes()) if little.name in _NARROW else None


def number_of(path: str, name: str, data: bytes) -> object:
    """Return the scalar again.

    Raises:
        ValueError: these are not its bytes, or numpy is not installed here.
    """
    if name not in _NARROW:
        raise ValueError(f"{path}: these are not the bytes of a state")
    try:
        numpy: Any = import_module("numpy")
    except ImportError as error:
        raise ValueError(
            f"{path}: the source has a {name} of numpy there, and numpy is not installed here"
        ) from error
    dtype = numpy.dtype(name)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{path}: expected the {dtype.itemsize} bytes of a {name}")
    return numpy.frombuffer(data, dtype.newbyteorder("<"))[0].astype(dtype)


def _kind_of_scalar(value: object) -> str:
    """As numpy.dtype.kind: "b", "i", "u", "f" and others; empty: it is no scalar of numpy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return ""
    scalar: Any = value
    kind: str = scalar.dtype.kind
    return kind
