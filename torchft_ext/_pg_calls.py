"""torch's operations as requests to a child process: spans of contiguous memory, no shapes.

Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchft_ext._pg_arguments import reduction_in
from torchft_ext._pg_frames import Issue, Item, Op, Reduction, Span

_ITEMS = {
    torch.float32: Item.F32,
    torch.float64: Item.F64,
    torch.float16: Item.F16,
    torch.bfloat16: Item.BF16,
    torch.int8: Item.I8,
    torch.int16: Item.I16,
    torch.int32: Item.I32,
    torch.int64: Item.I64,
    torch.uint8: Item.U8,
    torch.bool: Item.BOOL,
}
_OPS = dist.ReduceOp
_REDUCTIONS = {
    _OPS.SUM: Reduction.SUM,
    _OPS.PRODUCT: Reduction.PRODUCT,
    _OPS.MIN: Reduction.MIN,
    _OPS.MAX: Reduction.MAX,
    _OPS.BAND: Reduction.BAND,
    _OPS.BOR: Reduction.BOR,
    _OPS.BXOR: Reduction.BXOR,
}
_BITWISE = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)
_FLOATS = (Item.F32, Item.F64, Item.F16, Item.BF16)
_REDUCING = (Op.ALLREDUCE, Op.REDUCE, Op.REDUCE_SCATTER)
SpanOf = Callable[[torch.Tensor], Span]
_Spans = list[Span]


class Call(NamedTuple):
    """One request, but for its number; see Issue."""

    op: Op
    item: Item
    reduction: Reduction
    peer: int
    tag: int
    outputs: _Spans
    inputs: _Spans
    flat: bool = False

    def issue(self, number: int, limit: timedelta) -> Issue:
        limit_ms = max(1, limit // timedelta(milliseconds=1))
        fixed = self.op, self.item, self.reduction, self.peer, self.tag, limit_ms
        return Issue(number, *fixed, self.outputs, self.inputs, self.flat)


def calls_of(method: str, given: list[Any], size: int, span_of: SpanOf) -> list[Call]:
    """Return the requests that do what a method of torch's group does.

    Args:
        method: of torch.distributed.ProcessGroup.
        given: its arguments, tensors contiguous and where span_of knows them.
        size: of the group.
        span_of: says where a tensor lies.

    Raises:
        ValueError: sizes that do not fit, or a reduction or items that a child does not know.
    """
    calls = _Caller(given, size, span_of).calls(method)
    if not calls:
        raise ValueError("expected tensors, found none")
    return calls


class _Caller:
    def __init__(self, given: list[Any], size: int, span_of: SpanOf) -> None:
        self._first: Any = given[0] if given else []
        self._second: Any = given[1] if len(given) > 1 else []
        self._given = given
        self._size = size
        self._span_of = span_of

    def calls(self, method: str) -> list[Call]:
        make: Callable[[], list[Call]] = getattr(self, f"_of_{method}")
        return make()

    def _of_allreduce(self) -> list[Call]:
        return [self._call(Op.ALLREDUCE, [one], []) for one in _listed(self._first)]

    _of_allreduce_coalesced = _of_allreduce

    def _of_broadcast(self) -> list[Call]:
        return [self._call(Op.BROADCAST, [one], []) for one in _listed(self._first)]

    def _of_reduce(self) -> list[Call]:
        return [self._call(Op.REDUCE, [one], [one]) for one in _listed(self._first)]

    def _of_allgather(self) -> list[Call]:
        sources = _listed(self._second)
        lists = self._first if _is_nested(self._first) else [self._first]
        return [
            self._call(Op.ALLGATHER, list(outputs), [source])
            for outputs, source in zip(lists, sources, strict=True)
        ]

    def _of_allgather_coalesced(self) -> list[Call]:
        by_source = zip(*self._first, strict=True)
        return [
            self._call(Op.ALLGATHER, list(outputs), [source])
            for outputs, source in zip(by_source, self._second, strict=True)
        ]

    def _of__allgather_base(self) -> list[Call]:
        return [
            self._call(Op.ALLGATHER, self._parts(output), [source], flat=True)
            for output, source in zip(_listed(self._first), _listed(self._second), strict=True)
        ]

    _of_allgather_into_tensor_coalesced = _of__allgather_base

    def _of_reduce_scatter(self) -> list[Call]:
        sources = self._second if _is_nested(self._second) else [self._second]
        return [
            self._call(Op.REDUCE_SCATTER, [output], list(inputs))
            for output, inputs in zip(_listed(self._first), sources, strict=True)
        ]

    def _of__reduce_scatter_base(self) -> list[Call]:
        return [
            self._call(Op.REDUCE_SCATTER, [output], self._parts(source), flat=True)
            for output, source in zip(_listed(self._first), _listed(self._second), strict=True)
        ]

    _of_reduce_scatter_tensor_coalesced = _of__reduce_scatter_base

    def _of_gather(self) -> list[Call]:
        (source,) = _listed(self._second)
        return [self._call(Op.GATHER, _flat(self._first), [source])]

    def _of_scatter(self) -> list[Call]:
        (output,) = _listed(self._first)
        return [self._call(Op.SCATTER, [output], _flat(self._second))]

    def _of_alltoall_base(self) -> list[Call]:
        splits = [self._given[place] if len(self._given) > place else [] for place in (2, 3)]
        outputs = self._parts(self._first, splits[0])
        return [self._call(Op.ALLTOALL, outputs, self._parts(self._second, splits[1]))]

    def _of_barrier(self) -> list[Call]:
        return [self._call(Op.BARRIER, [], [])]

    def _of_send(self) -> list[Call]:
        return [self._message(Op.SEND, one) for one in _listed(self._first)]

    def _of_recv(self) -> list[Call]:
        return [self._message(Op.RECV, one) for one in _listed(self._first)]

    def _of_recv_anysource(self) -> list[Call]:
        tag = int(self._second)
        return [self._call(Op.RECV, [o], [], peer=-1, tag=tag) for o in _listed(self._first)]

    def _message(self, op: Op, tensor: torch.Tensor) -> Call:
        peer, tag = int(self._given[1]), int(self._given[2]) if len(self._given) > 2 else 0
        outputs, inputs = ([tensor], []) if op is Op.RECV else ([], [tensor])
        return self._call(op, outputs, inputs, peer=peer, tag=tag)

    def _parts(self, tensor: torch.Tensor, splits: Iterable[int] = ()) -> list[torch.Tensor]:
        """Return the ranks' parts of a tensor, by rows of its first dimension; equal: none."""
        flat, counts = tensor.view(-1), list(splits)
        if counts:
            row = flat.numel() // tensor.shape[0] if tensor.shape[0] else 0
            return list(flat.split([count * row for count in counts]))
        if flat.numel() % self._size:
            raise ValueError(
                f"expected {self._size} equal parts, found {flat.numel()} elements in a tensor"
            )
        return list(flat.split(flat.numel() // self._size)) if flat.numel() else [flat] * self._size

    def _call(
        self,
        op: Op,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        peer: int | None = None,
        tag: int = 0,
        flat: bool = False,
    ) -> Call:
        tensors = [*outputs, *inputs]
        item = _item_of(tensors, op in _REDUCING)
        reduction = self._reduction(item) if op in _REDUCING else Reduction.SUM
        chosen = self._root() if peer is None else peer
        written, read = ([self._span_of(one) for one in some] for some in (outputs, inputs))
        return Call(op, item, reduction, chosen, tag, written, read, flat)

    def _root(self) -> int:
        """Return the root that options, or a number, name; 0 where nothing does."""
        for value in self._given[1:]:
            root = getattr(value, "rootRank", value)
            if isinstance(root, int) and not isinstance(root, bool):
                return root
        return 0

    def _reduction(self, item: Item) -> Reduction:
        chosen = reduction_in(self._given[1:])
        reduction = next((ours for op, ours in _REDUCTIONS.items() if chosen == op), None)
        if reduction is None:
            raise ValueError(f"expected another reduction than {chosen}")
        if reduction in _BITWISE and item in _FLOATS:
            raise ValueError(f"expected integers or bool for {reduction.name}, found {item.name}")
        return reduction


def _item_of(tensors: list[torch.Tensor], reduces: bool) -> Item:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(f"expected tensors of one dtype, found {dtypes}")
    if not dtypes:
        return Item.U8
    (dtype,) = dtypes
    known = _ITEMS.get(dtype)
    if known is None and reduces:
        raise ValueError(f"expected items that a child process can add, found {dtype}")
    return Item.U8 if known is None else known


def _is_nested(value: Any) -> bool:
    return bool(value) and isinstance(value[0], (list, tuple))


def _flat(value: Any) -> list[Any]:
    """Return the tensors of a list, or of the one list in it."""
    listed = _listed(value)
    return list(listed[0]) if _is_nested(listed) else listed


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
