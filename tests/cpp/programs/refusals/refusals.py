"""What Python answers to the bad input of refusals_test.cpp.

refusals.py FILE: a line for each case, `name<TAB>type: text`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import torchft_ext

Cases = dict[str, Callable[[], object]]
NOWHERE = "127.0.0.1:1/x"


def made(rank: int, size: int, **options: object) -> dist.ProcessGroup:
    """Make a group over a store of its own."""
    return torchft_ext.make_group(dist.HashStore(), rank, size, backend="ft:host", **options)


def cases_of_making() -> Cases:
    """Return calls that make no group."""
    return {
        "null store": lambda: torchft_ext.make_group(None, 0, 1),
        "rank beyond": lambda: made(1, 1),
        "rank below": lambda: made(-1, 1),
        "size of none": lambda: made(0, 0),
        "limit of none": lambda: made(0, 1, timeout=timedelta(0)),
    }


def cases_of_membership(group: dist.ProcessGroup) -> Cases:
    """Return calls that begin no generation."""
    backend = torchft_ext.backend(group)
    return {
        "no address": lambda: backend.configure("no address", 0, 1),
        "configure rank beyond": lambda: backend.configure(NOWHERE, 2, 2),
        "configure rank below": lambda: backend.configure(NOWHERE, -1, 2),
        "configure size of none": lambda: backend.configure(NOWHERE, 0, 0),
        "configure limit of none": lambda: backend.configure(NOWHERE, 0, 1, timeout=timedelta(0)),
        "limit below": lambda: backend.set_timeout(timedelta(milliseconds=-1)),
        "split of strangers": lambda: group.split_group([0, 5]),
    }


def cases_of_tensors(group: dist.ProcessGroup) -> Cases:
    """Return operations that are refused for their tensors."""
    backend = torchft_ext.backend(group)
    root = dist.BroadcastOptions()
    root.rootRank = 1
    bits = dist.AllreduceOptions()
    bits.reduceOp = dist.ReduceOp.BAND
    return {
        "another device": lambda: backend.allreduce([torch.ones(3, device="meta")]),
        "no tensor": lambda: backend.allreduce([]),
        "sparse": lambda: backend.allgather([[torch.ones(3)]], [torch.ones(3).to_sparse()]),
        "root beyond": lambda: group.broadcast([torch.ones(3)], root),
        "bits of floats": lambda: group.allreduce([torch.ones(3)], bits),
        "peer beyond": lambda: group.send([torch.ones(3)], 1, 0),
    }


def cases_of_use(group: dist.ProcessGroup) -> Cases:
    """Return what is done with a group that cannot be used."""
    backend = torchft_ext.backend(group)
    return {
        "allreduce": lambda: group.allreduce([torch.ones(3)]).wait(),
        "barrier": lambda: group.barrier().wait(),
        "check": backend.check,
        "errored": backend.errored,
        "abort": lambda: backend.abort("again"),
        "stats": backend.stats,
        "split": lambda: group.split_group([0]),
        "configure": lambda: backend.configure(NOWHERE, 0, 1),
        "shutdown": backend.shutdown,
    }


def answers(when: str, cases: Cases) -> str:
    """Return a line for each case."""
    lines = ""
    for name, call in cases.items():
        try:
            call()
            answer = "nothing"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        lines += f"{when}{name}\t{answer}\n"
    return lines


def answers_of_child(group: dist.ProcessGroup) -> str:
    """Return the lines of a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, answers("child: ", cases_of_use(group)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        text = lines.read()
    os.waitpid(child, 0)
    return text


def main(path: str) -> None:
    """Write all answers."""
    lines = answers("", cases_of_making())
    group = made(0, 1, name="alone")
    lines += answers("", cases_of_membership(group)) + answers("", cases_of_tensors(group))
    lines += answers_of_child(group)
    group.allreduce([torch.ones(3)]).wait()  # it goes on after all of that
    torchft_ext.backend(group).abort("enough")
    lines += answers("aborted: ", {"allreduce": cases_of_use(group)["allreduce"]})
    torchft_ext.backend(group).shutdown()
    lines += answers("shut down: ", cases_of_use(group))
    Path(path).write_text(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
