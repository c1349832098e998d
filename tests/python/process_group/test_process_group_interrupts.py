"""Ctrl-C in configure() of groups over other backends, after the guard has its generation."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from process_group_side import LIMIT, held, leave, names, whole_sum
from ranks import World, values_of
from rankside import (
    connected_store,
    failure_of,
    kept,
    leave_default_group,
    main_thread_waits_in_c,
    seconds,
    wait_until,
)
from torch.distributed import distributed_c10d as c10d

import torchft_ext
from torchft_ext import CommError, _pg_guarded, _pg_making
from torchft_ext import process_group as pgs
from torchft_ext._pg_generation import Generation
from torchft_ext._pg_helpers import uninterrupted

LIMIT_TIME = seconds(LIMIT)
NATIVE = {"make_group": "_make_group", "ft": "_create_backend", "ft:gloo": "_create_backend"}
FIRST = {  # where the first of two interrupts comes: others make their backends, or this one does
    "others": (_pg_guarded, "_await_others"),
    "own": (_pg_making.Making, "has_made"),
}
PROMPT = 8.0  # seconds; of LIMIT, after which a member would notice by itself


class Noted(dist.ProcessGroup):
    """A backend that notes how it was ended."""

    def abort(self) -> None:
        kept["ended"] = "aborted"

    def kill(self) -> None:
        kept["ended"] = "killed"


def make(store, rank, size, timeout):
    """Gloo, or before it, while the test holds the gate, what notes its end."""
    gate = kept.get("gate")
    if gate is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    kept["making"] = True
    assert gate.wait(LIMIT)
    return Noted(rank, size)


def new_group(open_gate: bool) -> None:
    leave_default_group()
    kept["gate"] = threading.Event()
    if open_gate:
        kept["gate"].set()
    pgs.declare_backend("gated", pgs.BackendCapabilities(make=make))
    kept["group"] = pgs.ProcessGroupBackend("gated", timeout=LIMIT)


def configure(address: str, rank: int, size: int) -> None:
    kept["group"].configure(address, rank, size)


def make_gloo_from_now_on() -> None:
    kept.pop("gate").set()


def main_thread_is_in(function: str) -> None:
    """Return once it waits there."""
    main = threading.main_thread().ident
    assert main is not None

    def is_there() -> bool:
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        return frame is not None

    wait_until(lambda: kept.get("making", False) and is_there(), function)
    main_thread_waits_in_c()


def how_it_ended() -> str:
    wait_until(lambda: "ended" in kept, "the backend's end")
    wait_until(lambda: kept["group"].retired() == 0, "the retirement's end")
    return kept["ended"]


@pytest.mark.parametrize(
    ("makes", "place", "end"), [(0, "_make_backend", "killed"), (1, "_await_others", "aborted")]
)
def test_interrupt_leaves_configure_while_one_makes_its_backend(ranks, makes, place, end):
    """The rank that is interrupted, 0, or the other one, for which it waits."""
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    for rank in range(2):
        world.on(rank, new_group, rank != makes)
    calls = [world.start(rank, configure, address, rank, 2) for rank in range(2)]
    world.side(0, main_thread_is_in, place)
    world.interrupt(0)
    calls[0].error("KeyboardInterrupt", patience=10)
    told = calls[1].error("CommAbortedError", patience=10)
    assert "interrupted" in told.text and told.cause["rank"] == 0
    world.run(make_gloo_from_now_on)
    assert world.on(0, how_it_ended) == end
    address = ranks.address()
    values_of([world.start(rank, configure, address, rank, 2) for rank in range(2)])
    assert world.run(whole_sum) == [16.0] * 2
    world.run(leave)


# ---- at every place where Python looks for signals


class Interrupting:
    """Has a KeyboardInterrupt come at one place of a call, as after a signal.

    CPython looks for signals as a function begins and after each call of C's; those are the places,
    from the return of `begin` on, a native call or a function of the test's, in functions of this
    package.
    """

    def __init__(self, begin: str, number: int) -> None:
        self.came = False
        self._begin = begin
        self._places = itertools.count()
        self._number = number
        self._begun = False

    def _look(self, frame: FrameType, event: str, what: object) -> None:
        if event == "return" and frame.f_code.co_name in ("create", "make_group"):
            self._begun = False  # the group is its caller's now
        if event == "return" and frame.f_code.co_name == self._begin:
            self._begun = True
        ours = frame.f_globals.get("__name__", "").startswith("torchft_ext")
        made = event == "return" and frame.f_code.co_name == "__init__"
        if not ours or not (made or event in ("call", "c_return")):
            return
        if event == "c_return" and getattr(what, "__name__", "") == self._begin:
            self._begun = True
        if self._begun and not self.came and next(self._places) == self._number:
            self.came = True
            raise KeyboardInterrupt

    def run(self, call: Callable[[], object]) -> KeyboardInterrupt | None:
        """Call it; what came of it, with its traceback."""
        sys.setprofile(self._look)
        try:
            call()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.setprofile(None)
        return None


_alive: weakref.WeakSet[Counted] = weakref.WeakSet()


class Counted(dist.ProcessGroup):
    """A group of torch's around gloo; which of them are there is known."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: object) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        _alive.add(self)


def new_counted(kind: str) -> None:
    leave_default_group()
    pgs.declare_backend("counted", pgs.BackendCapabilities(make=Counted))
    if kind == "counted":
        kept["group"] = pgs.ProcessGroupBackend(kind, timeout=LIMIT)
    else:
        kept["group"] = getattr(pgs, f"ProcessGroup{kind}")(timeout=LIMIT)


def interrupted_everywhere(address: str) -> tuple[int, int]:
    """At how many places configure() was interrupted, and at how many of these it had begun the
    generation; what was raised is kept, with its tracebacks."""
    group, owned, common = kept["group"], 0, connected_store(address)
    errors = kept.setdefault("errors", [])
    for number in itertools.count():
        last, interrupting = group._formed, Interrupting("configure", number)
        error = interrupting.run(lambda: group.configure(f"{address}/{number}", 0, 2))  # noqa: B023
        if error is None:
            assert not interrupting.came, number
            break
        errors.append(error)
        if group._formed is not last and group.errored() is None:
            owned += 1
            group.abort()
        await_told(common, number)
    group.allreduce([torch.ones(1)]).wait()
    return number, owned


def first_interrupt(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def interrupted_again_everywhere(address: str, first: str) -> int:
    """At how many places configure() was interrupted once more after it had been interrupted in
    that one of its calls."""
    group, common = kept["group"], connected_store(address)
    owner, name = FIRST[first]
    errors = kept.setdefault("errors", [])
    for number in itertools.count():
        interrupting = Interrupting("first_interrupt", number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, first_interrupt)
            place = f"{address}/{number}"
            errors.append(interrupting.run(lambda: group.configure(place, 0, 2)))  # noqa: B023
        assert errors[-1] is not None
        await_told(common, number)
        wait_until(lambda: group._turn is None, "the end of what configure() has begun")
        if not interrupting.came:
            break
    group.configure(f"{address}/{number + 1}", 0, 2)
    group.allreduce([torch.ones(1)]).wait()
    return number


def await_told(common: dist.Store, number: int) -> None:
    """Whatever this rank did next would tell the other member too."""
    with suppress(dist.DistStoreError):  # the other one says that it was late
        common.wait([f"told{number}"], seconds(PROMPT))


def everything_held() -> dict[str, int]:
    """Once the old backends are gone, and the spare is there of a group that has one."""
    group = kept["group"]
    wait_until(lambda: group.retired() == 0, "the end of old backends")
    wait_until(getattr(group, "spare_is_ready", lambda: True), "the spare")
    gc.collect()
    return {**held(), "backends": len(_alive)}


def grown(before: dict[str, int]) -> dict[str, int]:
    """What there is more of than before, once all has had the time that it may take.

    A backend whose making was left behind waits for the other member, which was told first, up to
    its own limit.
    """

    def now() -> dict[str, int]:
        found = everything_held()
        return {name: found[name] - count for name, count in before.items() if found[name] > count}

    limit = time.monotonic() + LIMIT + PROMPT
    while now() and time.monotonic() < limit:
        time.sleep(0.05)
    return now()


def told_each_time(address: str) -> list[float]:
    """How long the other member took to learn of each interrupt."""
    group, times, common = kept["group"], [], connected_store(address)

    def begin_and_sum() -> None:
        group.configure(f"{address}/{len(times)}", 1, 2)
        group.allreduce([torch.ones(1)]).wait()

    while True:
        began = time.monotonic()
        error = failure_of(begin_and_sum)
        if error is None:
            return times
        common.set(f"told{len(times)}", "")
        times.append(time.monotonic() - began)
        assert error.type == "CommAbortedError" or times[-1] > PROMPT, error


@pytest.mark.parametrize("kind", ["counted", "BabyHost"])
def test_interrupt_anywhere_in_configure_is_told_and_leaves_nothing(ranks, kind):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    world.run(new_counted, kind)
    before: dict[str, int] = {}
    for turn in range(2):  # whatever there is to be had once is there after the first
        told = world.start(1, told_each_time, f"{address}/{turn}")
        places, owned = world.on(0, interrupted_everywhere, f"{address}/{turn}")
        times = told.value()
        assert places == len(times) and places > 30 and owned < places / 4
        assert max(times) < PROMPT
        before = before or world.on(0, everything_held)
    before["task"] += 3  # helpers, which stay: as many as were needed at one time
    before["fd"] += 1  # of this test
    assert world.on(0, grown, before) == {}
    world.run(leave)


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("kind", ["counted", "BabyHost"])
def test_second_interrupt_anywhere_after_the_first_is_told_and_leaves_nothing(ranks, kind, first):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    world.run(new_counted, kind)
    before: dict[str, int] = {}
    for turn in range(2):  # whatever there is to be had once is there after the first
        told = world.start(1, told_each_time, f"{address}/{turn}")
        places = world.on(0, interrupted_again_everywhere, f"{address}/{turn}", first)
        times = told.value()
        assert places + 1 == len(times) and places > 1
        assert max(times) < PROMPT
        before = before or world.on(0, everything_held)
    before["task"] += 3  # helpers, which stay: as many as were needed at one time
    before["fd"] += 1  # of this test
    assert world.on(0, grown, before) == {}
    world.run(leave)


def two_attempts(address: str, rank: int) -> tuple[float, float]:
    """How long each takes of two init_process_group() over one store. The first fails: rank 1 is
    interrupted before it has begun."""
    store, began = connected_store(address), time.monotonic()
    kept["stores"] = [store]
    leave_what_torch_has()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(pgs.ProcessGroupBackend, "__init__", first_interrupt)
        with pytest.raises(KeyboardInterrupt if rank == 1 else CommError):
            make_one(store, "ft:gloo", rank)
    failed = time.monotonic()
    make_one(store, "ft:gloo", rank)
    sum_over_what_was_made()
    return failed - began, time.monotonic() - failed


def test_interrupt_before_a_group_begins_is_told_to_members_that_wait(ranks):
    """By then torch has counted the group: another attempt is under another name."""
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    world.run(leave_default_group)
    calls = [world.start(rank, two_attempts, address, rank) for rank in range(2)]
    for first, second in values_of(calls):
        assert max(first, second) < PROMPT
    world.run(leave_what_was_made)


class Slow(pgs.ProcessGroupGloo):
    """A group of one; the test says when its steps on helpers go on."""

    def __init__(self, held_up: str) -> None:
        super().__init__(timeout=LIMIT)
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.done: list[str] = []
        self.generation: Generation | None = None
        self._held_up = held_up

    def _step(self, name: str) -> None:
        if name == self._held_up:
            self.begun.set()
            assert self.may_go_on.wait(LIMIT)
        self.done.append(name)

    def _adopted(self, generation: Generation, backends: list[object]) -> None:
        self._step("adopted")
        self.generation = generation
        generation.silence = lambda: None

    def _given_up(self) -> None:
        self._step("given up")

    def at(self, store: dist.TCPStore) -> None:
        """Begin a generation of its own."""
        self.configure(f"127.0.0.1:{store.port}/slow{next(names)}", 0, 1)

    def go_on(self) -> None:
        """Have the steps done that were held up, and wait for the end of configure()."""
        assert self._turn is not None
        self._held_up = ""
        self.may_go_on.set()
        wait_until(lambda: self._turn is None, "the end of what configure() has begun")


@contextmanager
def main_thread_interrupted(*when: Callable[[], object]) -> Iterator[None]:
    """A Ctrl-C for the wait that the main thread is in after each of these, up to one that returns
    False; the last one is raised here."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        for wait in when:
            if wait() is False:
                return
            main_thread_waits_in_c()  # before that a signal could be missed by the wait
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def test_second_interrupt_leaves_the_end_of_configure_to_a_helper(store, monkeypatch):
    """Until that is over there is no other configure()."""
    group = Slow("given up")
    with monkeypatch.context() as patch, main_thread_interrupted(partial(group.begun.wait, LIMIT)):
        patch.setattr(_pg_guarded, "_await_others", first_interrupt)
        group.at(store)
    assert group.done == ["adopted"]
    with pytest.raises(RuntimeError, match="what the last one has begun is still being ended"):
        group.at(store)
    group.go_on()
    group.at(store)
    group.allreduce([torch.ones(1)]).wait()
    group.shutdown()


def test_end_of_a_failed_configure_that_fails_too_leaves_the_group_free(store, monkeypatch):
    """Its own error is what configure() raises."""
    group = Slow("nothing")

    def fail(*_: object) -> None:
        raise OSError("a test says so")

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(_pg_guarded, "_await_others", lambda *_: 1 // 0)
        patch.setattr(group, "_given_up", fail)
        group.at(store)
    group.at(store)
    group.allreduce([torch.ones(1)]).wait()
    group.shutdown()


def test_abort_by_a_handler_that_came_into_an_operations_issue_is_done_after_it(store):
    group = Slow("nothing")
    group.at(store)
    generation = group.generation
    returned = threading.Event()

    def be_interrupted() -> None:
        with generation._lock:  # as issuing an operation has it for some lines
            group.abort()
        returned.set()

    threading.Thread(target=be_interrupted, daemon=True).start()
    assert returned.wait(PROMPT)
    wait_until(lambda: group.errored() is not None, "the abort")
    group.shutdown()


def test_interrupts_while_a_backend_is_adopted_leave_none(store):
    """Neither what adopts it nor what gives it up is half done, or done beside the other."""
    group = Slow("adopted")

    def first_has_come() -> None:
        wait_until(lambda: group._turn is not None and group._turn.error is not None, "the first")

    with main_thread_interrupted(partial(group.begun.wait, LIMIT), first_has_come):
        group.at(store)
    assert group.done == []
    group.go_on()
    assert group.done == ["adopted", "given up"]
    assert group.generation is not None and group.generation.silence is None
    wait_until(lambda: group.retired() == 0, "the end of the backend")
    group.at(store)
    group.allreduce([torch.ones(1)]).wait()
    group.shutdown()


def test_task_that_must_be_done_whole_ends_though_its_caller_was_interrupted():
    begun, may_end, done = threading.Event(), threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        assert may_end.wait(LIMIT)
        done.set()

    with main_thread_interrupted(partial(begun.wait, LIMIT)):
        uninterrupted(task)
    may_end.set()
    assert done.wait(LIMIT)


def interrupted_makings(address: str, how: str) -> int:
    """At how many places after its first generation had formed a group's making was interrupted."""
    errors: list[KeyboardInterrupt] = []
    common = connected_store(address)
    for number in itertools.count():
        # Of its own: a backend that is left behind may still wait in the last one's client.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        kept.setdefault("stores", []).append(store)
        common.set(str(number), str(store.port))
        interrupting = Interrupting(NATIVE[how], number)
        place = dist.PrefixStore("here", store)
        error = interrupting.run(lambda: make_one(place, how, 0))  # noqa: B023
        if error is None:
            return number
        errors.append(error)
        await_told(common, number)
        leave_what_torch_has()
    raise AssertionError


def leave_what_torch_has() -> None:
    """Of a making that failed: the number in the next group's name."""
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d._world.group_count = 0


def make_one(store: dist.Store, how: str, rank: int) -> None:
    if how == "make_group":
        kept["made"] = torchft_ext.make_group(store, rank, 2, name="made", timeout=LIMIT_TIME)
    else:
        dist.init_process_group(how, store=store, rank=rank, world_size=2, timeout=LIMIT_TIME)
        kept["made"] = dist.group.WORLD


def told_of_makings(address: str, how: str) -> list[float]:
    """How long the other member took to learn of each interrupt."""
    times: list[float] = []
    common = connected_store(address)

    def make_and_sum() -> None:
        make_one(store, how, 1)
        sum_over_what_was_made()

    while True:
        port = int(common.get(str(len(times))))
        store = connected_store(f"127.0.0.1:{port}/here")
        began = time.monotonic()
        error = failure_of(make_and_sum)
        if error is None:
            return times
        assert "CommError" in error.kinds, error
        common.set(f"told{len(times)}", "")
        times.append(time.monotonic() - began)
        kept.pop("made", None)
        leave_what_torch_has()


def sum_over_what_was_made() -> None:
    kept["made"].allreduce([torch.ones(1)]).wait()


def leave_what_was_made() -> None:
    kept.pop("made").shutdown()
    leave_what_torch_has()
    kept.pop("stores", None)
    gc.collect()  # frames that were left hold stores that serve: a fork must not end these


@pytest.mark.parametrize("how", NATIVE)
def test_interrupt_anywhere_in_the_making_of_a_group_is_told(ranks, how):
    world, address = World(ranks, ranks.borrow(2)), ranks.address()
    world.run(leave_default_group)
    told = world.start(1, told_of_makings, address, how)
    places = world.on(0, interrupted_makings, address, how)
    world.on(0, sum_over_what_was_made)
    times = told.value()
    assert places == len(times) and places > 2
    assert max(times) < PROMPT
    world.run(leave_what_was_made)
