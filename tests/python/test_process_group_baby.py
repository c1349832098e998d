"""Groups whose engine runs in a child process, which may be killed, stopped, or talk nonsense."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_group_side import (
    LIMIT,
    abort,
    exchanges,
    held,
    joined,
    leave,
    messages,
    own,
    results_of,
    scattered_sums,
    start_blocked,
    sums,
    whole_sum,
    world_of,
)
from ranks import World, values_of
from rankside import failure_of, kept, seconds, wait_until
from timing import AT_ONCE, assert_within
from torch._C._distributed_c10d import AllgatherOptions
from torch.nn.parallel import DistributedDataParallel

from torchft_ext import _C, CommAbortedError, CommError, CommTimeoutError, RendezvousError
from torchft_ext import _pg_baby as baby
from torchft_ext import _pg_frames as frames
from torchft_ext import process_group as pgs
from torchft_ext._pg_arena import KEPT, Arena, ArenaRoom
from torchft_ext._pg_child import Child

HOST = "BabyHost"
names = itertools.count()


def coalesced() -> list[torch.Tensor]:
    """Several tensors at once, none at all, and items that are only moved."""
    group, size = kept["group"], kept["group"].size()
    lists = [[torch.empty(4), torch.empty(4)] for _ in range(size)]
    group.allgather_coalesced(lists, [own(), own(1.0)]).wait()
    flat = [torch.empty(4 * size), torch.empty(4 * size)]
    group.allgather_into_tensor_coalesced(flat, [own(), own(2.0)]).wait()
    nothing = torch.empty(0)
    group.allreduce([nothing]).wait()
    largest, complexes = own().to(torch.bfloat16), own().to(torch.complex64)
    group.allreduce([largest], dist.ReduceOp.MAX).wait()
    group.broadcast_one(complexes, 0).wait()
    uneven_in, uneven_out = torch.arange(size + 1.0) + group.rank(), torch.empty(0)
    splits = [1] * (size - 1) + [2]  # the last rank gets one more of each
    received = [2] * size if group.rank() == size - 1 else [1] * size
    uneven_out = torch.empty(sum(received))
    group.alltoall_base(uneven_out, uneven_in, received, splits).wait()
    return [*itertools.chain(*lists), *flat, nothing, largest.float(), complexes.real, uneven_out]


@pytest.mark.parametrize("kind", ["BabyHost", "BabyGloo"])
def test_children_give_what_the_engine_in_the_process_gives(ranks, kind):
    results = []
    for chosen in ("Host", kind):
        world = world_of(ranks, 3, chosen)
        found = [
            world.run(results_of, operations)
            for operations in (sums, scattered_sums, exchanges, coalesced, messages)
        ]
        pair = joined(World(ranks, world.workers[:2]), chosen)
        found += [
            pair.run(results_of, operations)
            for operations in (sums, scattered_sums, exchanges, coalesced)
        ]
        world.run(leave)
        results.append(found)
    assert results[0] == results[1]


# ---- who dies, and who learns of it ----


def child_pid() -> int:
    return kept["group"].child_pid()


def has_ended(pid: int) -> bool:
    """Whether it runs no more; its parent may be still about to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def await_gone(*pids: int) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"the end of child {pid}")


@pytest.mark.parametrize(("victim", "kind"), [(0, HOST), (2, HOST), (0, "BabyGloo")])
def test_killed_child_releases_all_ranks_and_leaves_their_tensors(ranks, victim, kind):
    """Rank 0's child is in the operation, rank 2's is not."""

    def times() -> list[float]:
        world = world_of(ranks, 3, kind)
        pids = world.run(child_pid)
        calls = start_blocked(world, 2)
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        found = values_of(calls)
        words = f"rank {victim}: its child process {pids[victim]} was ended by SIGKILL"
        assert [error.type for error, _ in found] == ["CommAbortedError"] * 2
        assert [words in error.text for error, _ in found] == [True] * 2
        assert [left for _, left in found] == [[0.0] * 4] * 2
        joined(world, kind)
        assert world.run(whole_sum) == [36.0 - 27.0 + 18.0 - 9.0 + 18.0 - 18.0 + 18.0] * 3
        await_gone(*pids)
        world.run(leave)
        return [error.at - killed for error, _ in found]

    assert_within(AT_ONCE, times)


def test_killed_parent_is_told_to_all_and_takes_its_child_along(ranks):
    def times() -> list[float]:
        world = world_of(ranks, 3, HOST)
        orphan = world.on(2, child_pid)
        calls = start_blocked(world, 2)
        killed = time.monotonic()
        world.kill(2)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["PeerLostError"] * 2
        wait_until(lambda: has_ended(orphan), "the end of the child")
        survivors = joined(World(ranks, world.workers[:2]), HOST)
        survivors.run(whole_sum)
        survivors.run(leave)
        return [error.at - killed for error, _ in found]

    assert_within(AT_ONCE, times)


def fork_who_stays() -> int:
    """A process that inherits what this one has open."""
    pid = os.fork()
    if pid == 0:
        time.sleep(LIMIT * 2)
        os._exit(0)
    return pid


def test_child_ends_with_its_parent_though_a_fork_of_that_lives(ranks):
    world = world_of(ranks, 2, HOST)
    child, fork = world.on(1, child_pid), world.on(1, fork_who_stays)
    try:
        world.kill(1)
        wait_until(lambda: has_ended(child), "the end of the child")
    finally:
        os.kill(fork, signal.SIGKILL)
    world.on(0, leave)


def fork_that_forgets() -> int:
    """A process that drops its copy of the group; its exit status."""
    pid = os.fork()
    if pid == 0:
        kept.clear()
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_that_drops_the_group_leaves_its_child_alone(ranks):
    world = world_of(ranks, 2, HOST)
    assert world.on(0, fork_that_forgets) == 0
    world.run(whole_sum)
    world.run(leave)


def stop_child() -> int:
    pid = kept["group"].child_pid()
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_abort_releases_all_though_a_child_is_stopped(ranks):
    def times() -> list[float]:
        world = world_of(ranks, 3, HOST)
        stopped = world.on(0, stop_child)
        calls = start_blocked(world, 2)
        began = world.side(2, abort)
        found = values_of(calls)
        assert [error.type for error, _ in found] == ["CommAbortedError"] * 2
        assert [left for _, left in found] == [[0.0] * 4] * 2
        await_gone(stopped)
        joined(world, HOST)
        world.run(whole_sum)
        world.run(leave)
        return [error.at - began for error, _ in found]

    assert_within(AT_ONCE, times)


def go_on(address: str, rank: int, size: int, count: int) -> list[float]:
    found = []
    for number in range(count):
        kept["group"].configure(f"{address}/{number}", rank, size)
        tensor = torch.ones(2**18)
        kept["group"].allreduce([tensor]).wait()
        found.append(tensor[-1].item())
    return found


def test_slower_members_complete_the_last_operation_of_those_that_went_on(ranks):
    world, address = world_of(ranks, 3, HOST), ranks.address()
    calls = [world.start(rank, go_on, address, rank, 3, 20) for rank in range(3)]
    assert values_of(calls) == [[3.0] * 20] * 3
    world.run(leave)


def train() -> float:
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=kept["group"])
    model(torch.full((1, 2), float(kept["group"].rank()))).sum().backward()
    return model.module.weight.grad[0, 0].item()


def test_ddp_averages_gradients_over_children(ranks):
    world = world_of(ranks, 2, HOST)
    assert world.run(train) == [0.5, 0.5]
    world.run(leave)


# ---- one rank, in this process ----


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(store) -> str:
    return f"127.0.0.1:{store.port}/baby{next(names)}"


@pytest.fixture
def group(store):
    made = pgs.ProcessGroupBabyHost(timeout=LIMIT)
    made.configure(place(store), 0, 1)
    yield made
    made.shutdown()


def await_spare(group: pgs.ProcessGroupBaby) -> int:
    wait_until(group.spare_is_ready, "the spare")
    return group._children._spare.pid


def test_configure_takes_the_spare_and_has_another_started(store, group):
    first, spare = group.child_pid(), await_spare(group)
    group.configure(place(store), 0, 1)
    assert group.child_pid() == spare
    assert await_spare(group) not in (first, spare)
    await_gone(first)


def test_spare_that_died_is_replaced(store, group):
    spare = await_spare(group)
    os.kill(spare, signal.SIGKILL)
    await_gone(spare)
    group.configure(place(store), 0, 1)
    group.allreduce([torch.ones(1)]).wait()
    assert await_spare(group) != spare


def test_end_by_a_signal_without_a_name_is_told(store, group):
    child = group.child_pid()
    os.kill(child, 40)
    wait_until(lambda: group.errored() is not None, "the end of the child")
    assert f"its child process {child} was ended by signal 40" in str(group.errored())
    await_gone(child)


def shared_files() -> int:
    """Arenas that this process has mapped, or open."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("torchft_ext-arena")


def children() -> int:
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_generations_leave_no_processes_descriptors_threads_or_memory(store, group):
    def generations(count: int) -> None:
        for _ in range(count):
            group.configure(place(store), 0, 1)
            group.allreduce([torch.ones(1)]).wait()
        wait_until(lambda: group.retired() == 0, "the end of old children")
        await_spare(group)

    def all_held() -> dict[str, int]:
        gc.collect()
        return {**held(), "arenas": shared_files(), "children": children()}

    generations(3)
    before = all_held()
    before["task"] += 2  # helpers, which stay: as many as were needed at one time
    generations(20)

    def grown() -> dict[str, int]:
        return {name: count for name, count in all_held().items() if count > before[name]}

    try:
        wait_until(lambda: not grown(), f"as much as before: {before}")
    except AssertionError as error:
        raise AssertionError(f"{error}; there are now {grown()}") from None


def test_killed_generations_leave_nothing_either(store, group):
    def generations(count: int) -> None:
        for _ in range(count):
            pid = group.child_pid()
            os.kill(pid, signal.SIGSTOP)
            work = group.allreduce([torch.ones(1000)])
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(CommAbortedError, match="was ended by SIGKILL"):
                work.wait()
            group.configure(place(store), 0, 1)
        wait_until(lambda: group.retired() == 0, "the end of old children")
        await_spare(group)

    generations(2)
    before = {**held(), "arenas": shared_files(), "children": children()}
    before["task"] += 2  # helpers, which stay: as many as were needed at one time
    generations(10)

    def as_before() -> bool:
        gc.collect()
        now = {**held(), "arenas": shared_files(), "children": children()}
        return all(count <= before[name] for name, count in now.items())

    wait_until(as_before, f"as much as before: {before}")


def test_shutdown_does_not_wait_for_a_child_that_is_stopped(store):
    def times() -> list[float]:
        group = pgs.ProcessGroupBabyHost(timeout=LIMIT)
        group.configure(place(store), 0, 1)
        spare, child = await_spare(group), group.child_pid()
        os.kill(child, signal.SIGSTOP)
        began = time.monotonic()
        group.shutdown()
        took = time.monotonic() - began
        await_gone(child, spare)
        return [took]

    assert_within(AT_ONCE, times)


def test_group_that_is_dropped_takes_its_children_along(store):
    group = pgs.ProcessGroupBabyHost(timeout=LIMIT)
    group.configure(place(store), 0, 1)
    pids = [await_spare(group), group.child_pid()]
    del group
    gc.collect()
    await_gone(*pids)


def test_group_may_be_configured_again_after_shutdown(store, group):
    group.shutdown()
    with pytest.raises(CommError, match="shutdown\\(\\) was called"):
        group.allreduce([torch.ones(1)]).wait()
    group.configure(place(store), 0, 1)
    group.allreduce([torch.ones(1)]).wait()


def test_death_is_told_at_once_where_nothing_is_under_way(group):
    os.kill(group.child_pid(), signal.SIGKILL)
    wait_until(lambda: group.errored() is not None, "errored()")
    with pytest.raises(CommAbortedError, match="its child process"):
        group.allreduce([torch.ones(1)]).wait()


def test_callback_that_blocks_holds_up_no_other_operation(store, group):
    begun, may_end = threading.Event(), threading.Event()

    def block(_future):
        begun.set()
        assert may_end.wait(LIMIT)

    group.allreduce([torch.ones(1)]).get_future().add_done_callback(block)
    assert begun.wait(LIMIT)
    group.allreduce([torch.ones(1)]).wait(seconds(LIMIT / 2))
    may_end.set()


def listens_on(pid: int) -> set[str]:
    """The IPv4 addresses that a process has listening sockets on."""
    places = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())
    sockets = {place[8:-1] for place in places if place.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]
    return {socket.inet_ntoa(bytes.fromhex(one)[::-1]) for one in listening}


@pytest.mark.parametrize("kind", ["Host", "Gloo"])
def test_child_listens_where_it_is_told(store, kind):
    """Not on an address of its own choice: of this host's many, no other rule gives this one."""
    made = getattr(pgs, f"ProcessGroupBaby{kind}")(timeout=LIMIT)
    made._place, made._network = place(store), _C.Options(interface="127.0.0.3")
    request = made._request(0, 1, seconds(LIMIT), 1)
    child = made._children.take()
    child.configure(request, store, seconds(LIMIT))
    assert listens_on(child.pid) == {"127.0.0.3"}
    child.kill()
    made.shutdown()


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        (_C.Options(), "TORCHFT_EXT_SOCKET_IFNAME"),
        (_C.Options(), "GLOO_SOCKET_IFNAME"),
        (_C.Options(interface="=lo"), ""),
        (_C.Options(), ""),
    ],
)
def test_child_is_told_to_listen_where_its_group_does(monkeypatch, store, options, variable):
    if variable:
        monkeypatch.setenv(variable, "lo")
    made = pgs.ProcessGroupBabyHost(timeout=LIMIT, options=options)
    made.configure(place(store), 0, 1)
    assert made._request(0, 1, seconds(LIMIT), 1).address == "127.0.0.1"
    assert listens_on(made.child_pid()) == {"127.0.0.1"}
    made.shutdown()


def test_child_has_the_settings_of_its_groups_network(monkeypatch, store):
    monkeypatch.setenv("TORCHFT_EXT_HEARTBEAT", "0")
    monkeypatch.setenv("TORCHFT_EXT_LOCAL_SOCKETS", "0")
    made = pgs.ProcessGroupBabyHost(timeout=LIMIT, options=_C.Options(port_range="23000-23999"))
    made.configure(place(store), 0, 1)
    request = made._request(0, 1, seconds(LIMIT), 1)
    assert (request.heartbeat_ms, request.local_sockets) == (0, False)
    assert request.ports == "23000-23999"
    made.shutdown()


def test_limit_of_an_operation_ends_the_generation(group):
    os.kill(group.child_pid(), signal.SIGSTOP)
    work = group.allreduce([torch.ones(1)])
    with pytest.raises(CommTimeoutError, match=r"allreduce #1 on .*not complete after"):
        work.wait(seconds(0.05))
    assert isinstance(group.errored(), CommTimeoutError)


def blocked_for(limit: float) -> object:
    options = dist.AllreduceOptions()
    options.timeout = seconds(limit)
    return failure_of(lambda: kept["group"].allreduce([torch.ones(1)], options).wait())


def test_child_tells_that_the_time_is_over(ranks):
    world = world_of(ranks, 2, HOST)
    error = world.on(0, blocked_for, 0.3)
    assert (error.type, error.fields["limit"]) == ("CommTimeoutError", 0.3)
    world.run(leave)


def test_bad_arguments_are_told_and_leave_the_generation(group):
    with pytest.raises(ValueError, match="own input and output to be of one size"):
        options = dist.ReduceScatterOptions()
        group._reduce_scatter_base(torch.empty(2), torch.empty(3), options).wait()
    with pytest.raises(ValueError, match="expected tensors, found none"):
        group.allreduce([])
    with pytest.raises(ValueError, match="expected tensors on the CPU, found one on meta"):
        group.allreduce([torch.ones(1, device="meta")])
    with pytest.raises(ValueError, match="expected dense tensors"):
        group.allreduce([torch.ones(1).to_sparse()])
    with pytest.raises(ValueError, match=r"can add, found torch\.complex64"):
        group.allreduce([torch.ones(1, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="expected integers or bool for BAND, found F32"):
        group.allreduce([torch.ones(1)], dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="root: found 5"):
        group.broadcast_one(torch.ones(1), 5).wait()
    with pytest.raises(ValueError, match="expected 1 outputs and 1 inputs, found 2 and 1"):
        group.allgather([[torch.ones(1)] * 2], [torch.ones(1)], AllgatherOptions()).wait()
    assert group.errored() is None
    tensor = torch.ones(1)
    assert group.allreduce([tensor]).get_future().wait()[0] is tensor


def test_base_class_and_a_child_that_cannot_start_say_so(monkeypatch, store):
    with pytest.raises(NotImplementedError, match="make ProcessGroupBabyHost"):
        pgs.ProcessGroupBaby()
    monkeypatch.setattr(baby, "_HOST_CHILD", Path("/no/such/program"))
    with pytest.raises(OSError):
        pgs.ProcessGroupBabyHost()
    monkeypatch.setattr(baby, "_HOST_CHILD", Path("/bin/false"))
    group = pgs.ProcessGroupBabyHost(timeout=LIMIT)
    with pytest.raises(RendezvousError, match=r"its child process \d+ exited with status 1"):
        group.configure(place(store), 0, 1)
    group.shutdown()


def test_names_are_those_of_torchft():
    assert issubclass(pgs.ProcessGroupBabyHost, pgs.ProcessGroupBaby)
    assert issubclass(pgs.ProcessGroupBabyGloo, pgs.ProcessGroupBaby)
    group = pgs.ProcessGroupBabyHost(timeout=seconds(3))
    assert (group.getBackendName(), group.rank(), group.size()) == ("ft:baby-host", 0, 1)
    group.shutdown()


# ---- memory ----


def test_native_child_is_small(group):
    group.allreduce([torch.ones(1)]).wait()
    status = Path(f"/proc/{group.child_pid()}/status").read_text()
    (resident,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(resident) < 20 * 1024


def pages(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_arena_gives_what_was_given_back_first(store):
    arena = Arena()
    first, second, third = arena.take(100), arena.take(1), arena.take(64)
    assert (first, second, third) == (0, 128, 192)
    arena.give(second, 1)
    arena.give(first, 100)
    assert arena.take(192) == 0
    with pytest.raises(MemoryError, match="wait for operations"):
        arena.take(arena.size)
    arena.give(0, 192)
    arena.give(third, 64)
    assert arena.take(arena.size) == 0
    arena.close()


def test_large_tensors_give_their_memory_back_to_the_system():
    arena = Arena()
    room = ArenaRoom(arena)
    room.empty(torch.Size((2 * KEPT,)), torch.uint8).fill_(1)
    assert pages(arena) >= 2 * KEPT
    room.release()
    assert pages(arena) <= KEPT
    arena.close()


def test_room_of_an_operation_is_free_once_it_has_ended(store, group):
    arena = group._formed.backends[0]._arena
    for _ in range(3):
        group.allreduce([torch.ones(1000)]).wait()
    with pytest.raises(ValueError):
        group.allreduce([torch.ones(3), torch.ones(1, device="meta")])
    wait_until(lambda: arena._free == [(0, arena.size)], "a free arena")


# ---- frames ----

ISSUE = frames.Issue(
    7,
    frames.Op.SEND,
    frames.Item.I64,
    frames.Reduction.SUM,
    1,
    2**31,
    500,
    outputs=[(0, 8)],
    inputs=[(64, 16), (128, 0)],
)


def test_frames_come_out_as_they_went_in_however_they_are_cut():
    told = frames.Configure(1, 3, 9, 0, True, 29500, "näme", "eth0", "", "host", "pre/fix")
    done = frames.Done(2**40, frames.Outcome.FAILED, -1, "why")
    inbox, parsed = frames.Inbox(), []
    for byte in ISSUE.frame() + told.frame() + done.frame():
        parsed += inbox.feed(bytes([byte]))
    assert [kind for kind, _ in parsed] == [
        frames.Kind.ISSUE,
        frames.Kind.CONFIGURE,
        frames.Kind.DONE,
    ]
    assert frames.Issue.parse(parsed[0][1]) == ISSUE
    assert frames.Configure.parse(parsed[1][1]) == told
    assert frames.Done.parse(parsed[2][1]) == done


def test_bytes_that_are_no_frame_are_refused():
    payload = ISSUE.frame()[frames.HEADER.size :]
    for wrong in (payload[:-1], payload + b"x", payload[:8]):
        with pytest.raises(frames.FrameError):
            frames.Issue.parse(wrong)
    for header in (frames.HEADER.pack(frames.MOST + 1, 2), frames.HEADER.pack(0, 77)):
        with pytest.raises(frames.FrameError):
            list(frames.Inbox().feed(header))


def native_child() -> Child:
    return Child([str(baby._HOST_CHILD)], dict(os.environ))


@pytest.mark.parametrize(
    "nonsense",
    [
        frames.HEADER.pack(frames.MOST + 1, 2),
        frames.HEADER.pack(0, 77),
        ISSUE.frame(),  # before a generation
        frames.framed(frames.Kind.CONFIGURE, b"short"),
        frames.framed(frames.Kind.STORE_REPLY, frames.REPLY.pack(9, 0, 0)),
    ],
)
def test_native_child_that_hears_nonsense_ends(nonsense):
    child = native_child()
    wait_until(child.is_ready, "the child")
    child._send(nonsense)
    wait_until(child.has_ended, "its end")
    assert "exited with status 3" in child._ended


def test_native_child_refuses_memory_outside_the_arena(store, group):
    child = group._formed.backends[0]
    outside = frames.Issue(
        99,
        frames.Op.BROADCAST,
        frames.Item.U8,
        frames.Reduction.SUM,
        0,
        0,
        1000,
        outputs=[(child._arena.size - 8, 16)],
        inputs=[],
    )
    child._send(outside.frame())
    wait_until(lambda: group.errored() is not None, "errored()")
    assert "exited with status 3" in str(group.errored())


def test_child_that_talks_nonsense_is_killed(tmp_path):
    program = tmp_path / "child"
    program.write_text("#!/bin/sh\nprintf 'nonsense that is no frame' >&3\nsleep 60\n")
    program.chmod(0o755)
    child = Child([str(program)], dict(os.environ))
    wait_until(child.has_ended, "its end")
    assert "was ended by SIGKILL (a frame of kind" in child._ended


def test_native_child_started_by_hand_says_what_it_is_for():
    pid = os.posix_spawn(str(baby._HOST_CHILD), [str(baby._HOST_CHILD)], dict(os.environ))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
