"""Operations on device tensors that begin as one, and messages between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_side import check_sum, device, no_violation, ones
from rankside import backend
from values import check, me


def coalesced() -> None:
    rank, world = me()
    many = [ones(5, value=rank + n) for n in range(3)]
    with dist._coalescing_manager(device=device(), async_ops=True) as manager:
        for tensor in many:
            dist.all_reduce(tensor)
    manager.wait()
    for n, tensor in enumerate(many):
        expected = float(sum(source + n for source in range(world)))
        check(tensor.cpu(), torch.full((5,), expected), n)
    roots = [ones(3, value=rank) for _ in range(world)]
    with dist._coalescing_manager(device=device()):
        for root, tensor in enumerate(roots):
            dist.broadcast(tensor, root)
    for root, tensor in enumerate(roots):
        check(tensor.cpu(), torch.full((3,), float(root)), root)
    backend().check()
    no_violation()


def test_coalesced_operations_begin_as_one(devices):
    devices.world(3).run(coalesced)


def coalesced_here_and_there() -> str:
    check_sum()
    works: list[dist.Work] = []
    with pytest.raises(ValueError, match="issue it outside of the block") as caught:
        with dist._coalescing_manager(device=device(), async_ops=True):
            works.append(dist.group.WORLD.broadcast(torch.ones(3), 0))
            dist.barrier(async_op=True, device_ids=[device().index])
    for _ in range(2):
        with pytest.raises(ValueError, match="issue it outside of the block"):
            works[0].wait()
    assert works[0].is_completed() and not works[0].is_success()
    check_sum()
    no_violation()
    return str(caught.value)


def test_a_block_of_the_host_and_of_a_device_is_refused(devices):
    for text in devices.world(2).run(coalesced_here_and_there):
        assert "coalesced block" in text and "a barrier on" in text


def exchange_with_everyone() -> None:
    rank, world = me()
    received = {peer: ones(7, value=-1) for peer in range(world) if peer != rank}
    batch = []
    for peer, tensor in received.items():
        batch.append(dist.P2POp(dist.isend, ones(7, value=10 * rank + peer), peer))
        batch.append(dist.P2POp(dist.irecv, tensor, peer))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for peer, tensor in received.items():
        check(tensor.cpu(), torch.full((7,), 10.0 * peer + rank), peer)
    backend().check()
    no_violation()


@pytest.mark.parametrize("size", (2, 4))
def test_batch_of_sends_and_receives_with_everyone_completes(devices, size):
    devices.world(size).run(exchange_with_everyone)


def send_and_receive() -> None:
    rank, _ = me()
    for source in (0, 1):
        tensor = ones(9, value=rank)
        if rank == source:
            dist.send(tensor, 1 - rank)
        else:
            dist.recv(tensor, source)
            check(tensor.cpu(), torch.full((9,), float(source)), source)
    backend().check()
    no_violation()


def test_send_and_recv_deliver(devices):
    devices.world(2).run(send_and_receive)
