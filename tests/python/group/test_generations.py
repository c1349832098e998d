"""configure(): sizes change, and failed attempts leave nothing."""

from __future__ import annotations

import os
import random
import re
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import World, values_of
from rankside import (
    PATIENCE,
    abort,
    abort_from_many_threads,
    backend,
    configure,
    connected_store,
    describe,
    errored,
    failure_of,
    init_fresh,
    kept,
    leave_default_group,
    seconds,
    wait_until,
)
from test_network import listening
from timing import AT_ONCE, assert_within
from values import check_sum

NOTICE = 10.0  # seconds in which a failure must have reached everyone
BUSY = 10.0  # seconds that a busy machine may take beside a limit


def together(world: World, address: str) -> None:
    """The world begins a generation at this address, rather than at a fresh one."""
    size = world.size
    values_of([world.start(rank, configure, address, rank, size) for rank in range(size)])


def identity() -> tuple[int, ...]:
    group = dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    assert ranks == list(range(dist.get_world_size())) == dist.get_process_group_ranks(None)
    return (dist.get_rank(), group.rank(), backend().rank(), dist.get_world_size(), group.size())


def test_rank_and_size_follow_the_generation_everywhere(ranks):
    world = ranks.world(4)
    for order in ([0, 1, 2, 3], [2, 0], [3], [3, 1, 2, 0], [1, 0, 2]):
        generation = world.next(order)
        for rank, found in enumerate(generation.run(identity)):
            assert found == (rank, rank, rank, len(order), len(order))
        generation.run(check_sum)


def group_identity() -> int:
    return id(dist.group.WORLD)


def generation_number() -> int:
    return backend().generation


def test_the_group_object_stays_and_the_generation_number_grows(ranks):
    world = ranks.world(2)
    before, number = world.run(group_identity), world.run(generation_number)
    world = world.next()
    assert world.run(group_identity) == before
    assert all(new > old for new, old in zip(world.run(generation_number), number, strict=True))


def test_a_new_rank_may_join_a_running_group(ranks):
    pair = ranks.world(2)
    pair.run(check_sum)
    newcomer = ranks.borrow(1, besides=pair.workers)
    ranks.generation([*newcomer, *pair.workers]).run(check_sum)


def test_configure_fails_at_its_limit_when_a_member_never_comes(ranks):
    world, address = ranks.world(3), ranks.address()
    calls = [world.start(rank, configure, address, rank, 3, 2.0) for rank in (0, 1)]
    for call in calls:
        error = call.error("CommTimeoutError")
        assert error.fields["limit"] == 2.0 and error.fields["op"] == "configure"
        # Who is missing is asked at the end of the time, if the store answers within it.
        silent = ("no answer from the store", "the store did not say in time who")
        assert "rank 2 did not come" in error.text or any(text in error.text for text in silent)
    assert world.side(0, errored).type == "CommTimeoutError"
    together(world, address)
    world.run(check_sum)


def test_operations_after_a_failed_configure_speak_of_the_ranks_it_asked_for(ranks):
    world = ranks.world(3)
    world.start(2, configure, ranks.address(), 0, 2, 0.5).error("CommTimeoutError")
    error = world.start(2, check_sum).error("CommTimeoutError")
    assert (error.fields["rank"], error.fields["size"]) == (0, 2)


def test_the_same_prefix_works_again_after_a_generation_under_it(ranks):
    world, address = ranks.world(2), ranks.address()
    for _ in range(3):
        together(world, address)
        world.run(check_sum)


def generations_in_a_row(address: str, rank: int, size: int, count: int) -> None:
    for number in range(count):
        configure(f"{address}/{number}", rank, size)


def test_generation_may_follow_generation_without_an_operation_between(ranks):
    world, address = ranks.world(4), ranks.address()
    values_of([world.start(rank, generations_in_a_row, address, rank, 4, 30) for rank in range(4)])
    world.run(check_sum)


def test_two_processes_with_one_rank_are_told_so(ranks):
    world, address = ranks.world(3), ranks.address()
    claims = [world.start(n, configure, address, rank, 3, 4.0) for n, rank in enumerate((0, 1, 1))]
    errors = [call.error("CommError") for call in claims]
    # Whose record was overwritten; the other one has the rank, and waits in vain for rank 2.
    (told,) = [n for n, error in enumerate(errors) if error.type == "RendezvousError"]
    other = {1: 2, 2: 1}[told]
    place = f"host {socket.gethostname()}, pid {world.workers[other].pid}"
    assert f"duplicate rank 1: another process ({place}) uses this rank" in errors[told].text
    assert errors[other].type == "CommTimeoutError", errors[other].text
    world.next().run(check_sum)


def test_configure_without_a_server_raises_store_lost(ranks):
    world = ranks.world(1)
    call = world.start(0, configure, "127.0.0.1:1/nobody", 0, 2)
    error = call.error("StoreLostError", patience=NOTICE)
    assert error.text.count("127.0.0.1:1") == error.text.count("the store at") == 1, error.text
    world.next().run(check_sum)


def test_configure_with_an_unknown_host_raises_within_its_limit(ranks):
    world = ranks.world(1)
    call = world.start(0, configure, "no-such-host.invalid:1/nobody", 0, 2, 3.0)
    error = call.error("StoreLostError", "CommTimeoutError", patience=3.0 + BUSY)
    assert error.text.count("no-such-host.invalid") == 1, error.text
    world.next().run(check_sum)


def serve_store() -> int:
    kept["store"] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return kept["store"].port


def test_death_of_the_store_harms_no_generation_and_fails_the_next_configure(ranks):
    world = ranks.world(2)
    server = ranks.borrow(1, besides=world.workers)[0]
    address = f"127.0.0.1:{server.call(serve_store, (), {}).value()}/generation"
    together(world, address + "1")
    server.kill()
    world.run(check_sum)
    for call in [world.start(rank, configure, address + "2", rank, 2) for rank in range(2)]:
        call.error("StoreLostError", patience=NOTICE)
    world.next().run(check_sum)


def test_a_frozen_store_cannot_hold_configure_past_its_limit(ranks):
    world = ranks.world(2)
    server = ranks.borrow(1, besides=world.workers)[0]
    address = f"127.0.0.1:{server.call(serve_store, (), {}).value()}/generation"
    together(world, address + "1")
    server.freeze()
    for call in [world.start(rank, configure, address + "2", rank, 2, 1.0) for rank in range(2)]:
        error = call.error("CommTimeoutError", patience=1.0 + BUSY)
        assert "no answer from the store" in error.text, error.text
    world.next().run(check_sum)
    server.kill()


def times_of_an_abort(ranks, size: int, aborter: int, strike, *how: object) -> list[float]:
    """In configure(), which the last rank does not call: until each rank is released."""
    world, address = ranks.world(size), ranks.address()
    blocked = [world.start(rank, configure, address, rank, size) for rank in range(size - 1)]
    for rank in range(size - 1):
        ranks.await_key(address, str(rank))  # from here on the others know that it has come
    began, returned = world.side(aborter, strike, *how)
    errors = [call.error("CommAbortedError", patience=NOTICE) for call in blocked]
    for error in errors:
        assert error.cause["rank"] == aborter, error.text
        assert re.search(r"no longer wanted|striker \d", error.text), error.text
        assert error.fields["op"] == "configure"
    together(world, address)
    world.run(check_sum)
    return [returned - began, *(error.at - began for error in errors)]


@pytest.mark.parametrize("aborter", (0, 1))
def test_abort_releases_all_who_are_blocked_in_configure(ranks, aborter):
    how = (aborter, abort, "no longer wanted")
    assert_within(AT_ONCE, lambda: times_of_an_abort(ranks, 3, *how))


def test_aborts_at_the_same_moment_release_configure(ranks):
    how = (0, abort_from_many_threads, 8)
    assert_within(AT_ONCE, lambda: times_of_an_abort(ranks, 2, *how))


def test_death_of_a_member_is_told_to_those_who_await_it_in_configure(ranks):
    world, address = ranks.world(3), ranks.address()
    calls = [world.start(rank, configure, address, rank, 3) for rank in (0, 1)]
    for rank in (0, 1):
        ranks.await_key(address, str(rank))  # the last generation is over for both
    world.kill(2)
    for call in calls:
        assert call.error("PeerLostError", patience=NOTICE).cause["rank"] == 2
    world.next([0, 1]).run(check_sum)


def make_group() -> None:
    dist.new_group(range(3))


def test_death_is_told_to_those_who_wait_for_the_dead_in_new_group(ranks):
    world = ranks.fresh(3)
    calls = [world.start(rank, make_group) for rank in (0, 1)]
    world.kill(2)
    for call in calls:
        assert call.error("PeerLostError", patience=NOTICE).cause["rank"] == 2


def test_rank_whose_init_process_group_fails_is_told_to_all(ranks):
    world, address = World(ranks, ranks.borrow(3)), ranks.address()
    calls = [world.start(rank, init_fresh, address, rank, 3) for rank in (0, 1)]
    calls.append(world.start(2, init_fresh, address, 2, 4))  # another size
    for call in calls:
        assert "this rank was given 4" in call.error("RendezvousError").text
    ranks.fresh(3).run(check_sum)


def listen_on_neighbouring_ports(count: int) -> list[socket.socket]:
    while True:
        taken = [socket.create_server(("", 0))]
        first = taken[0].getsockname()[1]
        try:
            for port in range(first + 1, first + count):
                taken.append(socket.create_server(("", port)))
        except OSError:
            for each in taken:
                each.close()
        else:
            return taken


def init_badly(address: str, rank: int, size: int, how: str) -> None:
    import torchft_ext

    if how == "interface":
        os.environ["TORCHFT_EXT_SOCKET_IFNAME"] = "nonexistent9"
    options = 5 if how == "options" else None
    limit = seconds(PATIENCE)
    taken = listen_on_neighbouring_ports(3) if how == "port" else []
    if taken:
        first, *_, last = (each.getsockname()[1] for each in taken)
        options = torchft_ext.Options(port_range=f"{first}-{last}")
    leave_default_group()
    store = connected_store(address)
    try:
        dist.init_process_group(
            "ft", store=store, rank=rank, world_size=size, timeout=limit, pg_options=options
        )
    finally:
        for each in taken:
            each.close()
        os.environ.pop("TORCHFT_EXT_SOCKET_IFNAME", None)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("how", "kind", "why"),
    [
        ("interface", "ValueError", "found 'nonexistent9'"),
        ("options", "TypeError", "expected torchft_ext.Options, found int"),
        ("port", "RendezvousError", "choose another interface or port range"),
    ],
)
def test_rank_that_cannot_make_its_group_is_told_to_all(ranks, how, kind, why, victim):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world, address = World(ranks, ranks.borrow(3)), f"127.0.0.1:{server.port}/own"
    store = connected_store(address)
    keys = store.num_keys()
    others = [
        world.start(rank, init_fresh, address, rank, 3) for rank in range(3) if rank != victim
    ]
    wait_until(lambda: store.num_keys() >= keys + 2, "the records of the others")
    fault = world.start(victim, init_badly, address, victim, 3, how)
    assert why in fault.error(kind).text
    for call in others:
        error = call.error("RendezvousError")
        assert error.cause["rank"] == victim and why in error.text, error.text
        assert error.text.endswith(
            f"; correct this on rank {victim}, then call configure() again on all ranks"
        )
        assert "make a new group" not in error.text, error.text
    ranks.fresh(3).run(check_sum)


def configure_twice_at_once(address: str) -> str:
    import torchft_ext

    firsts: list[str] = []  # whichever of the two comes second is refused

    def configure_first() -> None:
        firsts.append(failure_of(lambda: configure(address, 0, 2, 20.0)).type)

    first = threading.Thread(target=configure_first)
    first.start()
    error = None
    while error is None and first.is_alive():  # until the two overlap
        try:
            backend().configure(address, 0, 2, timeout=seconds(0.001))
        except torchft_ext.CommError:
            continue
        except Exception as found:
            error = found
    backend().abort("enough")
    first.join(PATIENCE)
    assert not first.is_alive()
    return firsts[0] if error is None else describe(error).type


def test_concurrent_configure_is_refused_and_harms_nothing(ranks):
    world = ranks.world(2)
    assert world.on(0, configure_twice_at_once, ranks.address()) in ("RuntimeError", "ValueError")
    world.next().run(check_sum)


def timeout_survives() -> float:
    backend().set_timeout(seconds(0.4))
    kept["limit_set"] = True
    return 0.4


def recv_at_group_limit() -> None:
    dist.recv(torch.ones(1), 1)


def test_set_timeout_survives_the_next_generation(ranks):
    world, address = ranks.world(2), ranks.address()
    world.on(0, timeout_survives)
    together(world, address)
    error = world.start(0, recv_at_group_limit).error("CommTimeoutError")
    assert error.fields["limit"] == 0.4
    world.next().run(check_sum)


def options_through_generations(address: str, rank: int, first_port: int) -> list[int]:
    """The ports opened by a group whose options must still hold in its third generation."""
    import torchft_ext

    before = listening()
    leave_default_group()
    store = connected_store(f"{address}/alone/{rank}")
    options = torchft_ext.Options(
        timeout=seconds(6),
        interface="lo",
        port_range=f"{first_port}-{first_port + 300}",
        heartbeat=seconds(32),  # of its own: groups with equal options share their listeners
    )
    dist.init_process_group("ft", store=store, rank=0, world_size=1, pg_options=options)
    for generation in (2, 3):
        configure(f"{address}/{generation}", rank, 2)
        check_sum()
    error = failure_of(lambda: dist.recv(torch.ones(1), 1 - rank))
    assert error.type == "CommTimeoutError" and error.fields["limit"] == 6.0, error.text
    opened = listening() - before
    assert {bound_to for bound_to, _ in opened} == {"0100007F"}, opened  # 127.0.0.1
    return sorted(port for _, port in opened)


def test_options_survive_the_next_generations(ranks):
    world, address = ranks.world(2), ranks.address()
    first = random.randrange(20_000, 28_000)
    calls = [
        world.start(rank, options_through_generations, address, rank, first) for rank in range(2)
    ]
    for ports in values_of(calls):
        assert ports and all(first <= port <= first + 300 for port in ports), ports


def shut_down_twice() -> str:
    backend().shutdown()
    refused = failure_of(dist.barrier)
    assert refused.type == "CommAbortedError"
    assert "the group was shut down" in refused.text, refused.text
    assert refused.text.endswith("; make a new group"), refused.text
    backend().shutdown()
    error = failure_of(lambda: configure("127.0.0.1:1/x", 0, 1, 1.0))
    dist.destroy_process_group()
    return "" if error is None else error.type


def advice_after_the_end() -> list[str]:
    """What is advised after an abort and a shutdown, and to an operation of a destroyed group."""
    abort()
    backend().shutdown()
    texts = [str(backend().errored()), failure_of(backend().check).text]
    dist.destroy_process_group()
    return texts


def test_no_configure_is_advised_where_none_can_follow(ranks):
    world = ranks.fresh(1)
    for text in world.run(advice_after_the_end)[0]:
        assert text.endswith("; make a new group"), text


@pytest.mark.parametrize("size", (1, 2))
def test_shutdown_is_final_and_idempotent(ranks, size):
    world = ranks.fresh(size)
    world.run(check_sum)
    assert all(world.run(shut_down_twice))


def last_generation_of_many(address: str, rank: int) -> tuple[int, int]:
    """An old generation's work, waited for after the next generation began, tells of its own
    generation."""
    work = dist.irecv(torch.ones(3), 1 - rank)
    configure(address, rank, 2)
    error = failure_of(work.wait)
    assert error is not None and "CommError" in error.kinds
    check_sum()
    return error.fields["generation"], backend().generation


def test_work_of_an_older_generation_fails_with_its_own_generation(ranks):
    world, address = ranks.world(2), ranks.address()
    calls = [world.start(rank, last_generation_of_many, address, rank) for rank in range(2)]
    for old, new in values_of(calls):
        assert old < new


def make_groups_of_some() -> None:
    for members in ([0], [1], [0, 1]):
        dist.new_group(members)


def test_process_that_is_left_out_of_a_group_begins_the_next_generation(ranks):
    world = ranks.fresh(2)
    world.run(make_groups_of_some)
    address = ranks.address()
    together(world, address)
    world.run(check_sum)
