"""Functions that torch.compile made, through generations with another rank or size."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from typing import Any

import fresh_process
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from rankside import kept
from values import check, me

compilations: list[str] = []  # of this process, by name


def counting(name: str) -> Any:
    """A backend of torch.compile that runs what it is given, and counts."""

    def compiler(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        # torch writes the rank before each line of its log.
        logging.getLogger("torch._dynamo").warning("a test compiles '%s'", name)
        compilations.append(name)
        return graph.forward

    return torch.compile(backend=compiler, fullgraph=True)


def make_functions() -> None:
    compilations.clear()
    torch._dynamo.config.recompile_limit = 64

    @counting("size")
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x / dist.get_world_size()

    @counting("rank")
    def by_rank(x: torch.Tensor) -> torch.Tensor:
        return x + dist.get_rank()

    @counting("group")
    def by_group(x: torch.Tensor) -> torch.Tensor:
        return x / dist.group.WORLD.size()

    @counting("gather")
    def gather(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, dist.group.WORLD) * 1

    @counting("neither")
    def neither(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    kept["functions"] = (by_size, by_rank, by_group, gather, neither)


def use(compiled_anew: list[str] | None = None) -> None:
    """Right answers; and which were compiled for that, unless any may be."""
    rank, world = me()
    by_size, by_rank, by_group, gather, neither = kept["functions"]
    for _ in range(2):
        check(by_size(torch.tensor([12.0])), torch.tensor([12.0 / world]), "size")
        check(by_rank(torch.tensor([1.0])), torch.tensor([1.0 + rank]), "rank")
        check(by_group(torch.tensor([12.0])), torch.tensor([12.0 / world]), "group")
        check(gather(torch.tensor([1.0 + rank])), torch.arange(1.0, world + 1), "gather")
        check(neither(torch.tensor([3.0])), torch.tensor([6.0]), "neither")
    if compiled_anew is not None:
        assert compilations == compiled_anew, (rank, world, compilations)
    compilations.clear()


ASKED = ["size", "rank", "group", "gather"]
ALL = [*ASKED, "neither"]


def test_compiled_functions_follow_rank_and_size(ranks):
    world = ranks.world(3)
    world.run(make_functions)
    world.run(use, ALL)
    world = world.next()
    world.run(use, [])  # the same numbers
    world = world.next([2, 0])
    world.run(use, ASKED)
    world = world.next([1])  # it had rank 0 before, and a function for that
    world.run(use, ["size", "group", "gather"])
    world.next().run(use, [])


def reset_by_hand() -> None:
    torch.compiler.reset()


def test_compiled_functions_follow_after_a_reset_by_the_user(ranks):
    world = ranks.world(2)
    world.run(make_functions)
    world.run(use, ALL)
    world.run(reset_by_hand)
    world.run(use, ALL)
    world.next([1]).run(use, ASKED)


def make_subgroup() -> None:
    kept["subgroup"] = subgroup = dist.new_group([0, 1])
    mesh = dist.DeviceMesh.from_group(subgroup, "cpu")
    kept["ranks"] = [
        torch.compile(lambda x: x + dist.get_rank(subgroup), backend="eager", fullgraph=True),
        torch.compile(lambda x: x + mesh.get_local_rank(), backend="eager", fullgraph=True),
    ]


def use_subgroup(rank: int) -> None:
    for function in kept["ranks"]:
        check(function(torch.tensor([1.0])), torch.tensor([1.0 + rank]), "rank in the subgroup")


def swap_subgroup(address: str) -> None:
    import torchft_ext

    torchft_ext.backend(kept["subgroup"]).configure(address, 1 - dist.get_rank(), 2)


def test_compiled_functions_follow_ranks_in_subgroups(ranks):
    world = ranks.fresh(2)
    world.run(make_subgroup)
    assert [world.on(rank, use_subgroup, rank) for rank in (0, 1)] == [None, None]
    world.run(swap_subgroup, ranks.address())
    assert [world.on(rank, use_subgroup, 1 - rank) for rank in (0, 1)] == [None, None]


def use_all_the_time() -> None:
    """On a thread of its own, until stop_using()."""
    stopped, wrong = threading.Event(), []
    by_size = kept["functions"][0]
    steps = itertools.count()
    kept["steps"] = steps

    def loop() -> None:
        while not stopped.is_set():
            got = by_size(torch.tensor([12.0])).item()
            next(steps)
            if got not in (12.0, 6.0, 4.0):
                wrong.append(got)

    thread = threading.Thread(target=loop)
    thread.start()
    kept["using"] = (stopped, wrong, thread)


def stop_using() -> list[float]:
    stopped, wrong, thread = kept.pop("using")
    stopped.set()
    thread.join()
    assert next(kept["steps"]) > 0
    return wrong


def test_compiled_functions_may_be_running_in_another_thread(ranks):
    world = ranks.world(3)
    world.run(make_functions)
    world.run(use_all_the_time)
    whole = world
    for _ in range(8):
        world = whole.next([0, 1])
        world = whole.next([2, 0, 1])
    assert world.run(stop_using) == [[], [], []]
    whole.next([2, 1]).run(use)  # not the numbers that the first was compiled with


def answers(case: str) -> list[object]:
    """In a fresh process: what a function answers in a generation of one, and then of two."""
    if case == "compile first":
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    reading, writing = os.pipe()
    peer = os.fork()
    import torchft_ext

    dist.init_process_group("ft", store=dist.HashStore(), rank=0, world_size=1)
    if peer == 0:
        os.close(writing)
        torchft_ext.backend().configure(os.read(reading, 100).decode(), rank=0, world_size=2)
        os.read(reading, 1)  # until rank 1 has done that too: a death before would fail its call
        os._exit(0)
    loaded = "torch._dynamo" in sys.modules
    function = torch.compile(lambda x: x * dist.get_world_size(), backend="eager", fullgraph=True)
    before = function(torch.ones(1)).item()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{server.port}/two"
    os.write(writing, address.encode())
    torchft_ext.backend().configure(address, rank=1, world_size=2)
    os.close(writing)
    os.waitpid(peer, 0)
    return [loaded, before, function(torch.ones(1)).item()]


def test_compilations_are_noticed_whichever_is_imported_first(rank_env):
    cases = ["compile first", "ours first"]
    found = fresh_process.run_cases("test_compiled", "answers", cases, rank_env)
    # torch.compile's own modules take seconds to import: nothing of ours does that.
    assert found == {"compile first": [True, 1.0, 2.0], "ours first": [False, 1.0, 2.0]}
