"""Tensors of any layout: results are by element, whatever the strides here and on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from rankside import backend, wait_until
from values import check, check_sum, me, pattern, reduced_patterns

import torchft_ext

SHAPE = (2, 3, 4, 5)
NUMBER = 2 * 3 * 4 * 5
GAP = -1.0


class LaidOut(NamedTuple):
    tensor: torch.Tensor
    gaps: torch.Tensor  # of the same memory, to stay as they are

    def check(self, expected: torch.Tensor, what: object) -> None:
        check(self.tensor, expected, what)
        check(self.gaps, torch.full_like(self.gaps, GAP), (what, "gaps"))


def plain(values: torch.Tensor) -> LaidOut:
    return LaidOut(values.clone(memory_format=torch.contiguous_format), values.new_empty(0))


def channels_last(values: torch.Tensor) -> LaidOut:
    return LaidOut(values.clone(memory_format=torch.channels_last), values.new_empty(0))


def transposed(values: torch.Tensor) -> LaidOut:
    turned = values.permute(2, 0, 3, 1).clone(memory_format=torch.contiguous_format)
    return LaidOut(turned.permute(1, 3, 0, 2), values.new_empty(0))


def with_gaps(values: torch.Tensor) -> LaidOut:
    whole = values.new_full((*values.shape[:-1], 2 * values.shape[-1] + 1), GAP)
    whole[..., 1::2] = values
    return LaidOut(whole[..., 1::2], whole[..., 0::2])


LAYOUTS: tuple[Callable[[torch.Tensor], LaidOut], ...] = (
    plain,
    channels_last,
    transposed,
    with_gaps,
)


def given(rank: int, salt: int = 0) -> torch.Tensor:
    return pattern(rank, NUMBER, torch.float32, salt).view(SHAPE)


def summed(world: int, salt: int = 0) -> torch.Tensor:
    return reduced_patterns("SUM", world, NUMBER, torch.float32, salt).view(SHAPE)


class Layouts:
    """A rank's turn at the layouts; ranks differ, so that every two meet."""

    def __init__(self, rank: int, shift: int) -> None:
        self._next = rank + shift

    def of(self, values: torch.Tensor) -> LaidOut:
        self._next += 1
        return LAYOUTS[self._next % len(LAYOUTS)](values)

    def room(self, count: int) -> list[LaidOut]:
        return [self.of(torch.zeros(SHAPE)) for _ in range(count)]


def tensors_of(laid_out: list[LaidOut]) -> list[torch.Tensor]:
    return [each.tensor for each in laid_out]


def reductions(layouts: Layouts) -> None:
    rank, world = me()
    everywhere = layouts.of(given(rank))
    dist.all_reduce(everywhere.tensor)
    everywhere.check(summed(world), "all_reduce")
    for root in range(world):
        there = layouts.of(given(rank))
        dist.reduce(there.tensor, root)
        there.check(summed(world) if rank == root else given(rank), ("reduce", root))
    part = layouts.of(torch.zeros(SHAPE))
    dist.reduce_scatter(
        part.tensor, [layouts.of(given(rank, salt)).tensor for salt in range(world)]
    )
    part.check(summed(world, rank), "reduce_scatter")
    part = layouts.of(torch.zeros(SHAPE))
    whole = torch.cat([given(rank, salt) for salt in range(world)])
    dist.reduce_scatter_tensor(part.tensor, layouts.of(whole).tensor)
    part.check(summed(world, rank), "reduce_scatter_tensor")


def copies(layouts: Layouts) -> None:
    rank, world = me()
    for root in range(world):
        copy = layouts.of(given(rank))
        dist.broadcast(copy.tensor, root)
        copy.check(given(root), ("broadcast", root))
        room = layouts.room(world)
        dist.gather(
            layouts.of(given(rank)).tensor, tensors_of(room) if rank == root else None, root
        )
        for source, found in enumerate(room):
            expected = given(source) if rank == root else torch.zeros(SHAPE)
            found.check(expected, ("gather", root, source))
        part = layouts.of(torch.zeros(SHAPE))
        parts = [layouts.of(given(root, to)).tensor for to in range(world)]
        dist.scatter(part.tensor, parts if rank == root else None, root)
        part.check(given(root, rank), ("scatter", root))
    room = layouts.room(world)
    dist.all_gather(tensors_of(room), layouts.of(given(rank)).tensor)
    for source, found in enumerate(room):
        found.check(given(source), ("all_gather", source))
    whole = layouts.of(torch.zeros(world * SHAPE[0], *SHAPE[1:]))
    dist.all_gather_into_tensor(whole.tensor, layouts.of(given(rank)).tensor)
    whole.check(torch.cat([given(source) for source in range(world)]), "all_gather_into_tensor")


def exchanges(layouts: Layouts) -> None:
    rank, world = me()
    room = layouts.room(world)
    dist.all_to_all(tensors_of(room), [layouts.of(given(rank, to)).tensor for to in range(world)])
    for source, found in enumerate(room):
        found.check(given(source, rank), ("all_to_all", source))
    whole = layouts.of(torch.zeros(world * SHAPE[0], *SHAPE[1:]))
    rows = torch.cat([given(rank, to) for to in range(world)])
    dist.all_to_all_single(whole.tensor, layouts.of(rows).tensor)
    expected = torch.cat([given(source, rank) for source in range(world)])
    whole.check(expected, "all_to_all_single")
    if world == 1:
        return
    [received] = layouts.room(1)
    sending = dist.isend(layouts.of(given(rank)).tensor, (rank + 1) % world)
    dist.recv(received.tensor, (rank - 1) % world)
    sending.wait()
    received.check(given((rank - 1) % world), "recv")


def in_every_layout() -> None:
    rank, _ = me()
    for shift in range(len(LAYOUTS)):
        for operations in (reductions, copies, exchanges):
            operations(Layouts(rank, shift))


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_results_are_by_element_whatever_the_layouts(ranks, size):
    ranks.world(size).run(in_every_layout)


def item_sizes() -> None:
    rank, world = me()
    for dtype in (torch.bool, torch.int16, torch.float32, torch.float64, torch.complex128):
        numbers = given(0).to(dtype)
        for layout in LAYOUTS:
            laid_out = layout(numbers if rank == 0 else torch.zeros(SHAPE, dtype=dtype))
            dist.broadcast(laid_out.tensor, 0)
            check(laid_out.tensor, numbers, (dtype, layout.__name__))
    several = [LAYOUTS[n](given(rank, n)) for n in range(len(LAYOUTS))]
    dist.all_reduce_coalesced(tensors_of(several))
    for salt, found in enumerate(several):
        found.check(summed(world, salt), ("all_reduce_coalesced", salt))


def test_every_item_size_and_coalesced(ranks):
    ranks.world(2).run(item_sizes)


def model_parameters() -> None:
    rank, _ = me()
    torch.manual_seed(rank)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    reference = torch.nn.Conv2d(3, 4, 3)
    torch.manual_seed(0)
    reference.reset_parameters()
    if rank == 0:
        model.load_state_dict(reference.state_dict())
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        version = parameter._version
        dist.broadcast(parameter, 0)
        check(parameter.detach(), expected.detach(), "a parameter itself")
        assert parameter._version == version, "as of a contiguous tensor"
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_parameters_can_be_broadcast(ranks):
    ranks.world(3).run(model_parameters)


def left_alone() -> None:
    rank, _ = me()
    laid_out = with_gaps(given(rank))
    if rank == 0:
        sent = backend().stats()["bytes_sent"]
        work = dist.all_reduce(laid_out.tensor, async_op=True)
        wait_until(lambda: backend().stats()["bytes_sent"] > sent, "the first bytes of it")
        backend().abort("the test's")
        with pytest.raises(torchft_ext.CommError):
            work.wait()
        laid_out.check(given(rank), "of a failed operation")
    else:
        wait_until(lambda: backend().errored() is not None, "the other's abort")


def test_failed_operation_leaves_the_tensor_alone(ranks):
    world = ranks.world(2)
    world.run(left_alone)
    world.next().run(check_sum)


class Chained(NamedTuple):
    """Operations one after the other, each issued before the one before it is through."""

    name: str
    issue: Callable[[torch.Tensor], list[dist.Work]]
    factor: Callable[[int], float]  # what they make of ones, in a world of that size


def in_a_block(tensor: torch.Tensor) -> list[dist.Work]:
    with dist._coalescing_manager(device=tensor.device, async_ops=True) as manager:
        for _ in range(2):
            dist.all_reduce(tensor)
    return [manager]


def broadcast_then_sum(tensor: torch.Tensor) -> list[dist.Work]:
    if me()[0] > 0:
        tensor.fill_(5)
    return [dist.broadcast(tensor, 0, async_op=True), dist.all_reduce(tensor, async_op=True)]


CHAINED = (
    Chained(
        "sums",
        lambda tensor: [dist.all_reduce(tensor, async_op=True) for _ in range(3)],
        lambda world: float(world**3),
    ),
    Chained("block", in_a_block, lambda world: float(world**2)),
    Chained("broadcast_then_sum", broadcast_then_sum, float),
)


def last_after_the_others(issue: Callable[[], list[dist.Work]]) -> None:
    """Issue on all ranks and wait; no sum is through before all but the last have issued all."""
    rank, world = me()
    word = torch.zeros(1, device="cpu")
    # On a device the first operation of each kind and size may wait for everyone: NCCL connects
    # ranks anew for another algorithm.
    for size in (NUMBER, 1200):
        dist.all_reduce(torch.zeros(size))
        dist.broadcast(torch.zeros(size), 0)
        dist.all_gather_into_tensor(torch.zeros(world * size), torch.zeros(size))
    if rank == world - 1:
        for other in range(world - 1):
            dist.recv(word, other)
    works = issue()
    if rank < world - 1:
        dist.send(word, world - 1)
    for work in works:
        work.wait()


def chained(which: str) -> None:
    _, world = me()
    chain = next(each for each in CHAINED if each.name == which)
    for layout in LAYOUTS:
        laid_out = layout(torch.ones(SHAPE))
        last_after_the_others(lambda tensor=laid_out.tensor: chain.issue(tensor))
        laid_out.check(torch.full(SHAPE, chain.factor(world)), (which, layout.__name__))


@pytest.mark.parametrize("which", [chain.name for chain in CHAINED])
def test_tensor_of_any_layout_is_read_when_its_turn_has_come(ranks, which):
    ranks.world(3).run(chained, which)


def inputs_in_turn() -> None:
    """An input that an operation before it writes: other strides, or the memory of an output."""
    _, world = me()
    summed = torch.ones(40, 30)
    gathered = torch.zeros(world, 30, 40)
    last_after_the_others(
        lambda: [
            dist.all_reduce(summed, async_op=True),
            dist.all_gather_into_tensor(gathered.view(world * 30, 40), summed.t(), async_op=True),
        ]
    )
    check(gathered, torch.full((world, 30, 40), float(world)), "of the transposed sum")
    whole = torch.ones(world * 10 + 5)
    last_after_the_others(
        lambda: [
            dist.all_reduce(whole, async_op=True),
            dist.all_gather_into_tensor(whole[: world * 10], whole[5:15], async_op=True),
        ]
    )
    check(whole, torch.full((world * 10 + 5,), float(world)), "of a part of the output")


def test_inputs_are_read_when_their_turn_has_come(ranks):
    ranks.world(3).run(inputs_in_turn)
