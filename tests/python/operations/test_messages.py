"""send and recv, coalesced operations, and the object collectives that are built on them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from rankside import failure_of, seconds
from values import DTYPES, LARGE, SIZES, check, check_sum, me, pattern, reduced_patterns


def ring() -> None:
    rank, world = me()
    after, before = (rank + 1) % world, (rank - 1) % world
    for dtype in DTYPES:
        for size in (*SIZES, LARGE // 3):
            received = torch.zeros(size, dtype=dtype)
            sending = dist.isend(pattern(rank, size, dtype), after)
            dist.recv(received, before)
            sending.wait()
            check(received, pattern(before, size, dtype), (dtype, size))


@pytest.mark.parametrize("size", (2, 3, 5))
def test_messages_travel_round_a_ring(ranks, size):
    ranks.world(size).run(ring)


def of_other_dtypes(sent: torch.dtype, expected: torch.dtype) -> None:
    rank, _ = me()
    if rank == 0:
        dist.send(torch.ones(4, dtype=sent), 1)
    else:
        dist.recv(torch.zeros(4, dtype=expected), 0)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (torch.int32, torch.float32),
        (torch.float64, torch.int64),
        (torch.bool, torch.uint8),
        (torch.uint8, torch.float8_e5m2),
        (torch.uint16, torch.int16),
        (torch.uint32, torch.float32),
    ],
)
def test_dtypes_of_equal_size_are_told_apart_on_both_ranks(ranks, sent, expected):
    world = ranks.world(2)
    calls = [world.start(rank, of_other_dtypes, sent, expected) for rank in range(2)]
    names = [str(dtype).removeprefix("torch.") for dtype in (sent, expected)]
    for call in calls:
        text = call.error("MismatchError").text
        assert f"it issued send of {names[0]} (tag 0)" in text
        assert f"recv on rank 1 expects {names[1]}" in text


def message(dtype: torch.dtype, items: int, is_sent: bool) -> list:
    tensor = torch.full((items,), 1 + 2 * is_sent).to(dtype)
    dist.send(tensor, 1) if is_sent else dist.recv(tensor, 0)
    return torch.view_as_real(tensor).tolist() if tensor.is_complex() else tensor.int().tolist()


def test_complex_messages_of_equal_bytes_are_told_apart(ranks):
    world = ranks.world(2)
    calls = [
        world.start(0, message, torch.complex64, 2, True),
        world.start(1, message, torch.complex128, 1, False),
    ]
    for call in calls:
        text = call.error("MismatchError").text
        assert "send of float32 (tag 0)" in text and "rank 1 expects float64" in text


def complex_as_real() -> list:
    """By the group's own methods: torch's functions send complex tensors as real ones."""
    rank, _ = me()
    group, tensor = dist.group.WORLD, torch.full((2,), 1j * (rank == 0))
    if rank == 0:
        group.send([tensor], 1, 0).wait()
    else:
        group.recv([torch.view_as_real(tensor)], 0, 0).wait()
    return torch.view_as_real(tensor).tolist()


def test_complex_numbers_may_be_received_as_real_ones(ranks):
    world = ranks.world(2)
    calls = [world.start(rank, complex_as_real) for rank in range(2)]
    assert [call.value() for call in calls] == [[[0.0, 1.0]] * 2] * 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_messages_of_dtypes_without_reductions_arrive(ranks, dtype):
    world = ranks.world(2)
    calls = [world.start(rank, message, dtype, 3, rank == 0) for rank in range(2)]
    values = [call.value() for call in calls]
    assert values[0] == values[1]


def test_dtypes_of_messages_without_items_are_not_compared(ranks):
    world = ranks.world(2)
    calls = [
        world.start(0, message, torch.int32, 0, True),
        world.start(1, message, torch.float32, 0, False),
    ]
    assert [call.value() for call in calls] == [[], []]


def ordered_and_tagged() -> None:
    rank, _ = me()
    numbers = [torch.full((4,), float(n)) for n in range(6)]
    if rank == 0:
        for work in [dist.isend(numbers[n], 1, tag=n % 2) for n in range(6)]:
            work.wait()
        return
    received = [torch.zeros(4) for _ in range(6)]
    for n in (5, 3, 1, 4, 2, 0):  # the tags apart; within a tag in order of issue
        received[n] = torch.zeros(4)
    works = [dist.irecv(received[n], 0, tag=1) for n in (1, 3, 5)]
    works += [dist.irecv(received[n], 0, tag=0) for n in (0, 2, 4)]
    for work in works:
        work.wait()
    for n in range(6):
        check(received[n], numbers[n], n)


def test_messages_match_by_tag_in_order_of_issue(ranks):
    ranks.world(2).run(ordered_and_tagged)


def from_anyone() -> set[int]:
    rank, world = me()
    if rank:
        dist.send(torch.full((3,), float(rank)), 0)
        return set()
    sources = set()
    for _ in range(world - 1):
        received = torch.zeros(3)
        source = dist.recv(received)
        check(received, torch.full((3,), float(source)), source)
        sources.add(source)
    return sources


def test_recv_from_anyone_names_the_sender(ranks):
    assert ranks.world(4).run(from_anyone)[0] == {1, 2, 3}


def recv_outstanding() -> None:
    rank, _ = me()
    received = torch.zeros(8)
    if rank == 0:
        waiting = dist.irecv(received, 1)
        for _ in range(5):
            check_sum()
        assert not waiting.is_completed()
        dist.barrier()
        waiting.wait()
        check(received, torch.ones(8), "the message")
    else:
        for _ in range(5):
            check_sum()
        dist.barrier()
        dist.send(torch.ones(8), 0)


def test_outstanding_recv_holds_up_no_collective(ranks):
    ranks.world(2).run(recv_outstanding)


def batch() -> None:
    rank, world = me()
    after, before = (rank + 1) % world, (rank - 1) % world
    first, second = torch.zeros(5), torch.zeros(9)
    operations = [
        dist.P2POp(dist.irecv, first, before),
        dist.P2POp(dist.isend, pattern(rank, 5, torch.float32), after),
        dist.P2POp(dist.isend, pattern(rank, 9, torch.float32), after),
        dist.P2POp(dist.irecv, second, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check(first, pattern(before, 5, torch.float32), "first")
    check(second, pattern(before, 9, torch.float32), "second")


def test_batch_of_sends_and_receives_completes(ranks):
    ranks.world(3).run(batch)


def both_send_first() -> None:
    rank, _ = me()
    mine, theirs = torch.full((LARGE,), float(rank)), torch.zeros(LARGE)
    sending = dist.isend(mine, 1 - rank)
    receiving = dist.irecv(theirs, 1 - rank)
    sending.wait()
    receiving.wait()
    check(theirs, torch.full((LARGE,), 1.0 - rank), "crossing messages")


def test_large_messages_that_cross_do_not_block_each_other(ranks):
    ranks.world(2).run(both_send_first)


def coalesced() -> None:
    rank, world = me()
    tensors = [pattern(rank, size, torch.float32) for size in (3, 1, 200)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        check(tensor, reduced_patterns("SUM", world, tensor.numel(), torch.float32), "sum")
    outputs = [torch.zeros(size * world) for size in (4, 6)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((output.numel() // world,), float(rank)))
    for output in outputs:
        each = torch.arange(float(world)).repeat_interleave(output.numel() // world)
        check(output, each, "gathered")


def message_between_a_block_and_its_wait() -> None:
    """Rank 1 waits for the block before it sends, rank 0 after it has received."""
    rank, _ = me()
    tensor, word = torch.full((LARGE,), float(rank)), torch.full((1,), float(rank))
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.broadcast(tensor, 0)
    if rank == 0:
        dist.recv(word, 1)
    manager.wait()
    if rank == 1:
        dist.send(word, 0)
    assert tensor.sum().item() == 0 and word.item() == 1


def test_asynchronous_block_goes_on_though_nobody_waits_for_it(ranks):
    ranks.world(2).run(message_between_a_block_and_its_wait)


def test_coalesced_collectives_give_each_result(ranks):
    ranks.world(3).run(coalesced)


def begin_a_block_before_the_last_has_ended() -> None:
    group, device = dist.group.WORLD, torch.device("cpu")
    group._start_coalescing(device)
    work = group.allreduce([torch.ones(3)])
    assert not work.is_completed()
    group._start_coalescing(device)
    group.allreduce([torch.ones(3)])
    group._end_coalescing(device).wait()
    assert work.is_completed() and not work.is_success()
    for call in (work.wait, work.wait, work.result, work.get_future):
        with pytest.raises(RuntimeError, match="its coalesced block has never ended"):
            call()


def test_works_of_a_block_that_never_ended_raise(ranks):
    ranks.world(2).run(begin_a_block_before_the_last_has_ended)


def wait_for_messages_sent_at_intervals(count: int, interval: float, limit: float):
    """What wait(limit) of a block of receives raised, in the rank that receives."""
    rank, _ = me()
    if rank == 1:
        for _ in range(count):
            time.sleep(interval)
            # the generation may have failed meanwhile
            failure_of(lambda: dist.send(torch.ones(3), 0))
        return None
    group, device = dist.group.WORLD, torch.device("cpu")
    group._start_coalescing(device)
    for _ in range(count):
        group.recv([torch.zeros(3)], 1, 0)
    work = group._end_coalescing(device)
    began = time.monotonic()
    error = failure_of(lambda: work.wait(seconds(limit)))
    return error, time.monotonic() - began


def test_timeout_given_to_wait_holds_for_all_operations_of_a_block(ranks):
    world = ranks.world(2)
    error, took = world.run(wait_for_messages_sent_at_intervals, 6, 0.5, 1.0)[0]
    assert error is not None, f"wait(1 s) returned after {took} s"
    assert error.type == "CommTimeoutError" and error.fields["limit"] == 1.0, error.text
    assert took >= 1.0
    world.next().run(check_sum)


def objects() -> None:
    rank, world = me()
    mine = {"rank": rank, "text": "x" * (1000 * rank), "numbers": list(range(rank))}

    def made_by(source: int) -> dict:
        return {"rank": source, "text": "x" * (1000 * source), "numbers": list(range(source))}

    everything: list = [None] * world
    dist.all_gather_object(everything, mine)
    assert everything == [made_by(source) for source in range(world)]
    shared = [mine, rank] if rank == world - 1 else [None, None]
    dist.broadcast_object_list(shared, src=world - 1)
    assert shared == [made_by(world - 1), world - 1]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    assert gathered is None or gathered == [made_by(source) for source in range(world)]
    given: list = [None]
    dist.scatter_object_list(
        given, [made_by(n) for n in range(world)] if rank == 0 else None, src=0
    )
    assert given == [mine]


@pytest.mark.parametrize("size", (1, 2, 3))
def test_object_collectives_deliver_objects(ranks, size):
    ranks.world(size).run(objects)


def sent_objects() -> None:
    rank, _ = me()
    if rank == 0:
        dist.send_object_list(["one", {"two": 2}], dst=1)
    else:
        received: list = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["one", {"two": 2}]


def test_object_lists_can_be_sent(ranks):
    ranks.world(2).run(sent_objects)


def strided(rank: int) -> torch.Tensor:
    return pattern(rank, 12, torch.float32).view(3, 4).t()


def strided_inputs() -> None:
    rank, world = me()
    outputs = [torch.zeros(4, 3) for _ in range(world)]
    dist.all_gather(outputs, strided(rank))
    for source, output in enumerate(outputs):
        check(output, strided(source).contiguous(), ("all_gather", source))
    output = torch.zeros(4 * world, 3)
    dist.all_gather_into_tensor(output, strided(rank))
    check(output, torch.cat([strided(source) for source in range(world)]), "into_tensor")
    received = torch.zeros(4, 3)
    sending = dist.isend(strided(rank), (rank + 1) % world)
    dist.recv(received, (rank - 1) % world)
    sending.wait()
    check(received, strided((rank - 1) % world).contiguous(), "send")


def test_inputs_need_not_be_contiguous(ranks):
    ranks.world(3).run(strided_inputs)


def overlapping_output() -> None:
    rank, _ = me()
    tensor = pattern(rank, 4, torch.float32).expand(3, 4)
    for action in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        with pytest.raises(ValueError, match="memory for each element"):
            action(tensor)
    check(tensor[0], pattern(rank, 4, torch.float32), "refused and untouched")
    check_sum()


def test_output_whose_elements_share_memory_is_refused_and_untouched(ranks):
    ranks.world(2).run(overlapping_output)


def views_of_one_storage() -> None:
    rank, world = me()
    whole = torch.full((30,), -1.0)
    whole[10:20] = pattern(rank, 10, torch.float32)
    dist.all_reduce(whole[10:20])
    check(whole[10:20], reduced_patterns("SUM", world, 10, torch.float32), "the slice")
    outside = torch.cat([whole[:10], whole[20:]])
    check(outside, torch.full((20,), -1.0), "what lies outside of the slice")


def test_collective_on_a_slice_touches_nothing_outside_of_it(ranks):
    ranks.world(3).run(views_of_one_storage)
