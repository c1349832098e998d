"""Callbacks of futures that issue operations and wait for them: torch's communication hooks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rankside import ErrorInfo, backend, failure_of, seconds, wait_until
from torch import nn
from values import check, me

WIDTH, LAYERS, STEPS = 48, 6, 6


def summed(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum over the group, waited for by its future."""
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]


def future_of_ones(group: dist.ProcessGroup | None = None) -> torch.futures.Future:
    return dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()


# ---------------------------------------------------------------- nested waits


def nested(depth: int) -> None:
    _, world = me()

    def deeper(left: int) -> Callable:
        def callback(future: torch.futures.Future) -> torch.Tensor:
            value = future.value()[0] + 1
            if left == 0:
                return value
            inner = dist.all_reduce(value, async_op=True).get_future()
            return inner.then(deeper(left - 1)).wait()

        return callback

    expected = 0.0
    for _ in range(depth + 1):
        expected = (expected or 1.0) * world + 1
    for repeat in range(20):
        # On one rank the future is complete when it gets its callback, on the others hardly ever.
        future = future_of_ones()
        if me()[0] == repeat % world:
            wait_until(future.done, "the first future")
        result = future.then(deeper(depth))
        ordered = summed(torch.full((2,), 3.0))  # beside it
        check(result.wait(), torch.full((3,), expected), f"{depth} deep")
        check(ordered, torch.full((2,), 3.0 * world), "the threads' own")


def test_a_callback_waits_for_what_it_issues(ranks):
    for size in (2, 3, 4):
        ranks.world(size).run(nested, 1)


def wait_for_a_sibling() -> None:
    """A callback's callback waits for what another callback of the first future comes to."""
    held: dict[str, torch.futures.Future] = {}
    first = future_of_ones()
    waiting = first.then(lambda _: 1).then(lambda _: held["sibling"].wait())
    held["sibling"] = first.then(lambda _: 5)
    assert waiting.wait() == 5


def test_a_callback_may_wait_for_its_futures_next_callback(ranks):
    world = ranks.world(2)
    blocked = world.start_blocked(0, wait_for_a_sibling)  # so that the future is not complete
    world.on(1, wait_for_a_sibling)
    blocked.value()


def gather_in_a_callback() -> None:
    """A future of torch's own gets its callback inside one of ours: complete on one rank only."""
    rank, world = me()
    others = torch.futures.Future()
    both: list[torch.Tensor] = []

    def inner(_: torch.futures.Future) -> None:
        both.append(torch.full((3,), 1.0))  # issues nothing: what did would have no name

    def outer(future: torch.futures.Future) -> torch.Tensor:
        torch.futures.collect_all([others]).then(inner)
        inside = summed(torch.full((3,), 10.0))
        return inside + future.value()[0]

    if rank == 0:
        others.set_result(0)
    result = future_of_ones().then(outer)
    check(result.wait(), torch.full((3,), 11.0 * world), "what the callback issued")
    if rank != 0:
        others.set_result(0)
    assert len(both) == 1


def test_callbacks_of_torchs_own_futures_take_no_name_from_ours(ranks):
    ranks.world(2).run(gather_in_a_callback)


def issue_in_a_callback_of_torchs_own() -> None:
    def own(_: torch.futures.Future) -> None:
        dist.all_reduce(torch.ones(3))

    def outer(_: torch.futures.Future) -> None:
        complete = torch.futures.Future()
        complete.set_result(0)
        if me()[0] == 0:
            complete.then(own).wait()
        summed(torch.full((3,), 10.0))

    future_of_ones().then(outer).wait()


def test_what_a_callback_of_torchs_own_issues_never_pairs_with_a_named_one(ranks):
    world = ranks.world(2)
    world.run(backend_limit, 2)
    for call in world.start_all(issue_in_a_callback_of_torchs_own):
        ok, _ = call.outcome()
        assert not ok, "one rank's sum of ones was taken for the other's sum of tens"
    world.next().run(backend_limit, 40)


def backend_limit(limit: float) -> None:
    backend().set_timeout(seconds(limit))


def sum_sparse_in_a_callback() -> None:
    def outer(_: torch.futures.Future) -> None:
        dist.all_reduce(torch.eye(3).to_sparse())

    future_of_ones().then(outer).wait()


def test_a_sparse_sum_in_a_callback_is_refused(ranks):
    for call in ranks.world(2).start_all(sum_sparse_in_a_callback):
        assert "expected a dense tensor in a callback" in call.error("RuntimeError").text


def test_callbacks_wait_three_deep(ranks):
    ranks.world(3).run(nested, 3)


def several_callbacks() -> None:
    """Several of one future, from several calls of get_future(), each with an order of its own."""
    rank, world = me()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == 0:
        work.wait()

    def issue(factor: float) -> Callable:
        def callback(_: object) -> list[torch.Tensor]:
            pending = [
                dist.all_reduce(torch.full((5,), factor * i), async_op=True) for i in range(3)
            ]
            return [one.get_future().wait()[0] for one in reversed(pending)]

        return callback

    results = [work.get_future().then(issue(10.0**power)) for power in range(4)]
    for power, result in enumerate(results):
        for i, value in enumerate(reversed(result.wait())):
            check(value, torch.full((5,), 10.0**power * i * world), "one of them")


def test_callbacks_of_one_future_do_not_mix(ranks):
    ranks.world(3).run(several_callbacks)


def two_groups() -> None:
    rank, world = me()
    other = dist.new_group(list(range(world)))

    def into(group: dist.ProcessGroup | None, value: float) -> Callable:
        return lambda future: summed(future.value()[0] * value, group)

    for _ in range(10):
        # Each rank begins with another of the two.
        groups = [None, other] if rank % 2 == 0 else [other, None]
        begun = {group: future_of_ones(group) for group in groups}
        first = begun[None].then(into(other, 2.0))
        second = begun[other].then(into(None, 3.0))
        check(first.wait(), torch.full((3,), 2.0 * world**2), "first")
        check(second.wait(), torch.full((3,), 3.0 * world**2), "second")
    dist.destroy_process_group(other)


def test_futures_of_two_groups_wait_for_each_other(ranks):
    ranks.fresh(2).run(two_groups)


def a_peer_stays_away() -> ErrorInfo | None:
    rank, _ = me()
    first = future_of_ones()
    first.wait()
    if rank == 1:
        return failure_of(lambda: wait_until(lambda: backend().errored() is not None, "the end"))
    backend().set_timeout(seconds(0.5))
    return failure_of(first.then(lambda future: summed(future.value()[0])).wait)


def test_a_peer_that_stays_away_ends_a_nested_wait_by_the_limit(ranks):
    error, nothing = ranks.world(2).run(a_peer_stays_away)
    assert nothing is None
    assert "issued in a callback of allreduce #" in error.text
    assert "0.5 s" in error.text


# ---------------------------------------------------------------- where and when callbacks run


def names_of_threads() -> None:
    """Callbacks never run on the thread that adds them, and are given the future itself."""
    future = future_of_ones()
    future.wait()
    seen = []
    added = threading.get_ident()
    result = future.then(lambda given: seen.append((given is future, threading.get_ident())))
    result.wait()
    future.add_done_callback(lambda given: seen.append((given is future, threading.get_ident())))
    wait_until(lambda: len(seen) == 2, "both callbacks")
    for itself, ran in seen:
        assert itself
        assert ran != added
    failed = future.then(lambda _: 1 / 0)
    assert "ZeroDivisionError" in failure_of(failed.wait).text
    both = torch.futures.collect_all([future, future_of_ones()])
    check(both.wait()[1].value()[0], torch.full((3,), float(me()[1])), "collect_all")
    assert len(torch.futures.wait_all([future, future_of_ones()])) == 2


def test_callbacks_run_on_threads_of_their_own(ranks):
    ranks.world(2).run(names_of_threads)


def one_at_a_time() -> None:
    running: list[int] = []
    seen: list[int] = []

    def callback(index: int) -> Callable:
        def run(_: object) -> None:
            running.append(index)
            torch.randn(100, 100) @ torch.randn(100, 100)  # without the GIL
            assert running == [index]
            seen.append(running.pop())

        return run

    for future in [future_of_ones().then(callback(i)) for i in range(50)]:
        future.wait()
    assert sorted(seen) == list(range(50))


def test_callbacks_that_do_not_wait_run_one_at_a_time(ranks):
    ranks.world(2).run(one_at_a_time)


def too_many_wait() -> tuple[str, int]:
    free = threading.Event()
    entered: list[int] = []

    def block(index: int) -> Callable:
        def run(_: object) -> None:
            entered.append(index)
            free.wait()

        return run

    blocked = [future_of_ones().then(block(i)) for i in range(70)]
    try:
        wait_until(lambda: backend().errored() is not None, "the failure")
        error = str(backend().errored())
    finally:
        free.set()
    for future in blocked:
        future.wait()
    return error, backend().stats()["counters"]["most_callback_threads"]


def test_a_group_whose_callbacks_find_no_thread_fails_and_says_so(ranks):
    ends = ranks.fresh(2).run(too_many_wait)
    for error, _ in ends:
        assert "its callbacks found no thread: 64 callbacks" in error
    # The other rank is told, and may have had fewer.
    assert max(threads for _, threads in ends) >= 64


def mixed_up() -> ErrorInfo | None:
    """What a callback of a receive's future issues has no name, and pairs with no thread's."""
    rank, _ = me()
    if rank == 0:
        dist.send(torch.ones(1), dst=1)
        return failure_of(lambda: summed(torch.ones(3)))
    received = dist.irecv(torch.zeros(1), src=0).get_future()
    return failure_of(received.then(lambda _: summed(torch.ones(3))).wait)


def test_what_a_nameless_callback_issues_pairs_with_no_threads(ranks):
    for error in ranks.world(2).run(mixed_up):
        assert "issued in a callback" in error.text
        assert "begin a new generation" in error.text


# ---------------------------------------------------------------- torch's hooks


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def batches(world: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(7)
    return [torch.randn(4 * world, WIDTH, generator=source) for _ in range(STEPS)]


def wrapped(
    model: nn.Module, group: dist.ProcessGroup | None
) -> nn.parallel.DistributedDataParallel:
    """With a bucket for each layer or two."""
    ddp = nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=0.008, gradient_as_bucket_view=True
    )
    return ddp


def trained(
    hook: Callable, state: object, group: dist.ProcessGroup | None, rows: slice
) -> tuple[nn.Module, int]:
    """The model after some steps, and how many buckets the hook was given in the last."""
    calls: list[int] = []

    def counting(its_state, bucket):  # DDP compares annotations, which are texts here
        calls.append(bucket.index())
        return hook(its_state, bucket)

    model = model_of()
    ddp = wrapped(model, group)
    ddp.register_comm_hook(state, counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches(me()[1]):
        calls.clear()
        optimizer.zero_grad()
        ddp(batch[rows]).pow(2).mean().backward()
        optimizer.step()
    return model, len(calls)


def beside_one_process(make: Callable, tolerance: float) -> None:
    """A linear hook over all ranks gives what it gives one process with the whole batch."""
    rank, world = me()
    groups = [dist.new_group([one]) for one in range(world)]
    alone = groups[rank]
    hook, state = make(None)
    together, buckets = trained(hook, state, None, slice(4 * rank, 4 * rank + 4))
    assert buckets >= 4, buckets
    hook, state = make(alone)
    expected, _ = trained(hook, state, alone, slice(None))
    for found, wanted in zip(together.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        mean = found.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(found.detach(), mean, atol=1e-7, rtol=1e-6)
    dist.destroy_process_group(alone)


def power_sgd(group: dist.ProcessGroup | None, batched: bool = False) -> tuple[Callable, object]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as module

    state = module.PowerSGDState(
        process_group=group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        random_seed=3,
    )
    # That of torch refuses the matrices of torch's batched hook, which have two dimensions.
    orthogonalize = module._orthogonalize_gram_schmidt
    module._orthogonalize = lambda m, epsilon=0: orthogonalize(
        m if m.dim() == 3 else m.unsqueeze(0), epsilon
    )
    return (module.batched_powerSGD_hook if batched else module.powerSGD_hook), state


def plain(name: str) -> Callable:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return lambda group: (getattr(default_hooks, name), group)


def hooks_of_power_sgd() -> None:
    beside_one_process(power_sgd, 1e-4)


def hooks_of_batched_power_sgd() -> None:
    beside_one_process(lambda group: power_sgd(group, batched=True), 1e-4)


def hooks_that_compress() -> None:
    beside_one_process(plain("allreduce_hook"), 1e-5)
    beside_one_process(plain("fp16_compress_hook"), 1e-3)
    beside_one_process(plain("bf16_compress_hook"), 1e-2)


def all_gather_as_nccl(*args, **kwargs) -> SimpleNamespace:
    """With a future of one tensor that holds all, as torch's quantising hooks want it."""
    future = dist.all_gather(*args, **kwargs).get_future()
    stacked = future.then(lambda gathered: [torch.stack(gathered.value())])
    return SimpleNamespace(get_future=lambda: stacked)


def hooks_that_quantise() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as module

    module.dist = SimpleNamespace(**{**vars(dist), "all_gather": all_gather_as_nccl})
    for hook in (module.quantization_pertensor_hook, module.quantization_perchannel_hook):
        beside_one_process(lambda group, hook=hook: (hook, group or dist.group.WORLD), 2e-2)


def test_power_sgd_with_many_buckets_is_that_of_one_process(ranks):
    ranks.fresh(2).run(hooks_of_power_sgd)
    ranks.fresh(3).run(hooks_of_power_sgd)


def test_batched_power_sgd_with_many_buckets_is_that_of_one_process(ranks):
    ranks.fresh(2).run(hooks_of_batched_power_sgd)


def test_compressing_hooks_with_many_buckets_are_those_of_one_process(ranks):
    ranks.fresh(2).run(hooks_that_compress)


def test_quantising_hooks_with_many_buckets_are_near_those_of_one_process(ranks):
    ranks.fresh(2).run(hooks_that_quantise)


def post_local_sgd() -> None:
    """Averaged over all ranks for two steps, then over a group of one: each rank's own."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as module

    rank, world = me()
    groups = [dist.new_group([one]) for one in range(world)]
    state = module.PostLocalSGDState(None, groups[rank], start_localSGD_iter=2)
    rows = slice(4 * rank, 4 * rank + 4)
    found, buckets = trained(module.post_localSGD_hook, state, None, rows)
    assert buckets >= 4, buckets
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(batches(world)):
        optimizer.zero_grad()
        model(batch if step < 2 else batch[rows]).pow(2).mean().backward()
        optimizer.step()
    for one, wanted in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-5)
    dist.destroy_process_group(groups[rank])


def test_post_local_sgd_with_many_buckets_is_that_of_one_process(ranks):
    ranks.fresh(2).run(post_local_sgd)


def zero_interleaved() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
        hook_with_zero_step_interleaved,
    )
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, world = me()
    model = model_of()
    alone = copy.deepcopy(model)
    ddp = wrapped(model, None)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05, momentum=0.9
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    single = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step, batch in enumerate(batches(world)):
        ddp.zero_grad()
        ddp(batch[4 * rank : 4 * rank + 4]).pow(2).mean().backward()
        if step < 2:
            continue  # the hook only warms up
        single.zero_grad()
        alone(batch).pow(2).mean().backward()
        single.step()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_zero_interleaved_with_ddp_is_one_process_with_the_whole_batch(ranks):
    for _ in range(3):
        ranks.world(2).run(zero_interleaved)
    ranks.world(3).run(zero_interleaved)


def many_works_in_callbacks() -> None:
    """Waits by Work.wait(), by an explicit limit, and synchronous operations."""
    _, world = me()

    def callback(_: object) -> torch.Tensor:
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=30))
        dist.barrier()
        gathered = [torch.zeros(4) for _ in range(world)]
        dist.all_gather(gathered, tensor)
        dist.broadcast(tensor, 0)
        return sum(gathered)

    results = [future_of_ones().then(callback) for _ in range(20)]
    for result in results:
        check(result.wait(), torch.full((4,), float(world) ** 4), "the last sum")


def test_callbacks_issue_operations_of_all_kinds_and_wait_for_them(ranks):
    ranks.world(3).run(many_works_in_callbacks)
