"""Copies of an operation's tensors, and operations that a backend lacks, made of those that it has.

A backend may still be inside an operation after its group was aborted. So it works on copies, also
of the inputs, because the caller may change those once its wait has ended. The operation's owner
copies the outputs back, unless the operation failed. Copies lie in a room: the heap, or memory that
is shared with a child process (`_pg_arena.py`). Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from torchft_ext._pg_arguments import reduction_in

_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
_RECEIVES = ("recv", "recv_anysource")
_FIELDS = ("timeout", "rootRank", "rootTensor", "asyncOp", "sparseIndices")

Pair = tuple[torch.Tensor, torch.Tensor]  # the caller's, the backend's


class Room(Protocol):
    """Where the copies of one operation lie."""

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of that shape, whose values are whatever they are."""

    def release(self) -> None:
        """Take back what empty() gave; nobody uses it any more. May be called again."""


class Heap:
    """Room like that of any tensor, which goes with it."""

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def release(self) -> None:
        pass


HEAP = Heap()


class Staged(NamedTuple):
    """An operation that is ready to be issued.

    Attributes:
        method: of a torch.distributed.ProcessGroup.
        args: its arguments, with copies for tensors.
        kwargs: the same.
        outputs: what to copy, from second to first, when it has ended.
        result: the caller's outputs.
        divisor: what outputs are divided by before; 1: they are not.
        timeout: of this operation; None: the group's.
        room: of the copies; whoever ends the operation releases it.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Pair]
    result: list[torch.Tensor]
    divisor: int
    timeout: timedelta | None
    room: Room

    def issue(self, group: dist.ProcessGroup) -> dist.Work:
        work: dist.Work = getattr(group, self.method)(*self.args, **self.kwargs)
        return work

    def copy_out(self) -> None:
        """Write the caller's outputs. Blocks as copies do, without the GIL."""
        with torch.no_grad():
            for target, source in self.outputs:
                if self.divisor > 1 and source.is_floating_point():
                    source.div_(self.divisor)
                elif self.divisor > 1:
                    source.div_(self.divisor, rounding_mode="trunc")
                if target is not source:
                    target.copy_(source)


class Stager:
    """Stages one operation of a rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        copies: bool,
        room: Room = HEAP,
        reduce_scatters: bool = False,
    ) -> None:
        """Make it.

        Args:
            rank: in the generation, of `size` ranks.
            size: see above.
            copies: whether the backend works on copies.
            room: of copies.
            reduce_scatters: whether the backend has that itself; else it is made of a sum.
        """
        self._rank = rank
        self._size = size
        self._copies = copies
        self._room = room
        self._reduce_scatters = reduce_scatters
        self._outputs: list[Pair] = []
        self._divisor = 1
        self._timeout: timedelta | None = None

    def stage(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged:
        """Copy an operation's inputs, and make room for its outputs.

        Args:
            name: of a method in `_pg_wrappers.OPERATIONS`; `args`, `kwargs`: what it was given, in
                the order of places.

        Raises:
            ValueError: a tensor of another device than the backend's, or sizes that do not fit.
        """
        try:
            return self._stage(name, args, kwargs)
        except BaseException:
            self._room.release()
            raise

    def _stage(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged:
        given = {
            str(number) if key is None else key: self._plain(value)
            for number, (key, value) in enumerate([*((None, a) for a in args), *kwargs.items()])
        }
        native = self._reduce_scatters and "reduce_scatter" in name
        special = None if native else _EMULATED.get(name)
        if special is not None:
            method, arguments = special(self, list(given.values()))
            return self._staged(method, tuple(arguments), {})
        copied = self._copied(name, given)
        return self._staged(
            name,
            tuple(copied[str(number)] for number in range(len(args))),
            {key: copied[key] for key in kwargs},
        )

    def _staged(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged:
        result = [target for target, _ in self._outputs]
        return Staged(
            method, args, kwargs, self._outputs, result, self._divisor, self._timeout, self._room
        )

    def _plain(self, value: Any) -> Any:
        """Note the options' timeout; return a sum's options for those of an average."""
        timeout = getattr(value, "timeout", value)
        if isinstance(timeout, timedelta) and timeout > timedelta(0):
            self._timeout = timeout
        if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return dist.ReduceOp.SUM if self._averages(value) else value
        if self._averages(getattr(value, "reduceOp", None)):
            return _with_sum(value)
        return value

    def _averages(self, op: object) -> bool:
        if op is None or op != dist.ReduceOp.AVG:
            return False
        self._divisor = self._size
        return True

    def _copied(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Replace tensors: those of the first argument are outputs, others are inputs."""
        copied: dict[str, Any] = {}
        for number, (key, value) in enumerate(given.items()):
            if number == 0 and name in _IN_PLACE:
                is_output = self._is_output(name, list(given.values()))
                copied[key] = self._each(value, self.changed if is_output else self.read)
            elif number == 0 and name != "send" and name != "barrier":
                copied[key] = self._each(value, self.written)
            else:
                copied[key] = self._each(value, self.read)
        return copied

    def _is_output(self, name: str, given: list[Any]) -> bool:
        """Whether this rank's tensors of an operation with a root are changed."""
        root = given[1] if len(given) > 1 else 0
        root = getattr(root, "rootRank", root)
        if name == "broadcast":
            return bool(root != self._rank)
        return name != "reduce" or bool(root == self._rank)

    def _each(self, value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return make(value)
        if isinstance(value, (list, tuple)):
            return [self._each(one, make) for one in value]
        return value

    def check_device(self, tensor: torch.Tensor) -> None:
        """Raise ValueError for a tensor where the backend has none."""
        if tensor.device.type != "cpu":
            raise ValueError(f"expected tensors on the CPU, found one on {tensor.device}")

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the backend reads in a tensor's place."""
        self.check_device(tensor)
        if not self._copies:
            return tensor
        if tensor.layout is not torch.strided:
            return self._sparse(tensor)
        return self._room.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def _sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._room is not HEAP:
            raise ValueError(f"expected dense tensors, found one of layout {tensor.layout}")
        return tensor.detach().clone()

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the backend reads and writes in a tensor's place."""
        copy = self.read(tensor)
        self._outputs.append((tensor, copy))
        return copy

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the backend writes in a tensor's place."""
        self.check_device(tensor)
        copy = tensor
        if self._copies:
            copy = self._room.empty(tensor.shape, tensor.dtype)
        self._outputs.append((tensor, copy))
        return copy

    def flat(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return one copy of several tensors, of one dimension."""
        for tensor in tensors:
            self.check_device(tensor)
        if not tensors:
            raise ValueError("expected tensors, found none")
        parts = [tensor.detach().reshape(-1) for tensor in tensors]
        count = sum(part.numel() for part in parts)
        return torch.cat(parts, out=self._room.empty(torch.Size((count,)), parts[0].dtype))

    def out_of(self, buffer: torch.Tensor, offset: int, output: torch.Tensor) -> None:
        """Note that an output lies in a buffer of the backend's, from an element on."""
        if buffer.numel() < offset + output.numel():
            raise ValueError(
                f"expected inputs for {self._size} ranks of {output.numel()} elements each, found "
                f"{buffer.numel()} elements"
            )
        part = buffer[offset : offset + output.numel()]
        self._outputs.append((output, part.reshape(output.shape)))

    def reduce_scatter_lists(self, given: list[Any]) -> tuple[str, list[Any]]:
        """As a sum of everything, of which each rank keeps its part: so does torch's gloo."""
        outputs, inputs = _lists(given[0]), given[1]
        buffers = []
        if isinstance(given[0], torch.Tensor):  # torch's form for one
            inputs = [inputs]
        for output, parts in zip(outputs, inputs, strict=True):
            buffers.append(self.flat(parts))
            before = sum(part.numel() for part in parts[: self._rank])
            self.out_of(buffers[-1], before, output)
        return "allreduce_coalesced", [buffers, self._sum_options(given[2:])]

    def reduce_scatter_tensors(self, given: list[Any]) -> tuple[str, list[Any]]:
        """The same, of tensors whose parts lie behind one another."""
        buffers = []
        for output, source in zip(_lists(given[0]), _lists(given[1]), strict=True):
            buffers.append(self.flat([source]))
            if source.numel() != self._size * output.numel():
                raise ValueError(
                    f"expected an input of {self._size * output.numel()} elements, found "
                    f"{source.numel()}"
                )
            self.out_of(buffers[-1], self._rank * output.numel(), output)
        return "allreduce_coalesced", [buffers, self._sum_options(given[2:])]

    def gather_single(self, given: list[Any]) -> tuple[str, list[Any]]:
        """As a gather into the parts of one buffer."""
        output, source = given[0], self.read(given[1])
        options = given[2] if len(given) > 2 else dist.GatherOptions()
        if options.rootRank != self._rank:
            return "gather", [[], [source], options]
        count = self._size * source.numel()
        if output.numel() != count:
            raise ValueError(
                f"gather_single: output: expected {count} elements, found {output.numel()}"
            )
        buffer = self._room.empty(torch.Size((self._size, *source.shape)), source.dtype)
        self.out_of(buffer.view(-1), 0, output)
        return "gather", [[list(buffer)], [source], options]

    def _sum_options(self, rest: list[Any]) -> Any:
        options = _c10d.AllreduceCoalescedOptions()
        options.reduceOp = reduction_in(rest)
        if self._timeout is not None:
            options.timeout = self._timeout
        return options

    def alltoall_lists(self, given: list[Any]) -> tuple[str, list[Any]]:
        """As an exchange of two buffers, which every version of torch's gloo has."""
        outputs, inputs = given[0], given[1]
        source = self.flat(inputs)
        count = sum(one.numel() for one in outputs)
        target = self._room.empty(torch.Size((count,)), source.dtype)
        offset = 0
        for output in outputs:
            self.out_of(target, offset, output)
            offset += output.numel()
        splits = [[one.numel() for one in tensors] for tensors in (outputs, inputs)]
        return "alltoall_base", [target, source, *splits, *given[2:]]


def _with_sum(options: Any) -> Any:
    """Return a copy of an operation's options, whose reduceOp is SUM."""
    copy = type(options)()
    for name in _FIELDS:
        if hasattr(options, name):
            setattr(copy, name, getattr(options, name))
    copy.reduceOp = dist.ReduceOp.SUM
    return copy


def _lists(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


_Emulation = Callable[[Stager, list[Any]], tuple[str, list[Any]]]
_EMULATED: dict[str, _Emulation] = {
    "_reduce_scatter_base": Stager.reduce_scatter_tensors,
    "alltoall": Stager.alltoall_lists,
    "gather_single": Stager.gather_single,
    "reduce_scatter": Stager.reduce_scatter_lists,
    "reduce_scatter_tensor_coalesced": Stager.reduce_scatter_tensors,
}
