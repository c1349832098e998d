"""What a group and its child process exchange: shared memory, and frames, nonsense too."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from rankside import wait_until

from torchft_ext import _pg_baby
from torchft_ext import _pg_frames as frames
from torchft_ext._pg_arena import KEPT, Arena, ArenaRoom
from torchft_ext._pg_child import Child


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


def test_room_of_an_operation_is_free_once_it_has_ended(store, baby):
    arena = baby._formed.backends[0]._arena
    for _ in range(3):
        baby.allreduce([torch.ones(1000)]).wait()
    with pytest.raises(ValueError):
        baby.allreduce([torch.ones(3), torch.ones(1, device="meta")])
    wait_until(lambda: arena._free == [(0, arena.size)], "a free arena")


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
    return Child([str(_pg_baby._HOST_CHILD)], dict(os.environ))


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


def test_native_child_refuses_memory_outside_the_arena(store, baby):
    child = baby._formed.backends[0]
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
    wait_until(lambda: baby.errored() is not None, "errored()")
    assert "exited with status 3" in str(baby.errored())


def threads_of(pid: int) -> set[str]:
    return {(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()}


def test_native_child_tells_of_ends_without_another_thread(store, baby):
    baby.allreduce([torch.ones(1)]).wait()
    assert "ft-callback" not in threads_of(baby.child_pid())


def test_native_child_goes_on_while_its_parent_reads_nothing(store, baby):
    child, reads = baby._formed.backends[0], threading.Event()
    heard = child._done

    def held_up(done: frames.Done) -> None:
        reads.wait()
        heard(done)

    child._done = held_up
    works = [baby.barrier() for _ in range(3000)]  # whose answers no socket holds
    wait_until(lambda: "ft-callback" in threads_of(child.pid), "an answer that waits")
    last = baby.allreduce([torch.ones(1)])
    reads.set()
    for work in [*works, last]:
        work.wait()
    assert baby.errored() is None


def test_child_that_talks_nonsense_is_killed(tmp_path):
    program = tmp_path / "child"
    program.write_text("#!/bin/sh\nprintf 'nonsense that is no frame' >&3\nsleep 60\n")
    program.chmod(0o755)
    child = Child([str(program)], dict(os.environ))
    wait_until(child.has_ended, "its end")
    assert "was ended by SIGKILL (a frame of kind" in child._ended


def test_native_child_started_by_hand_says_what_it_is_for():
    pid = os.posix_spawn(str(_pg_baby._HOST_CHILD), [str(_pg_baby._HOST_CHILD)], dict(os.environ))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
