"""A store that dies or freezes in the middle of configure(): all end by their limit, say why, and
go on at another store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ranks import Call, Pool, World
from rankside import PATIENCE, configure, connected_store, wait_until
from test_generations import serve_store
from values import check_sum

# Seconds, of a configure() whose store ends so: a dead one is told long before.
LIMITS = {"dies": 30.0, "freezes": 4.0}
KINDS = {"dies": ("StoreLostError",), "freezes": ("StoreLostError", "CommTimeoutError")}
TOLD_WITHIN = 10.0  # seconds; it takes two or three, and as long as the limit where it freezes


class Server:
    """A store in a process of its own that is to end, of which the test sees who has come."""

    def __init__(self, pool: Pool, world: World, end: str) -> None:
        self.how_it_ends = end
        self._worker = pool.borrow(1, besides=world.workers)[0]
        self.place = f"127.0.0.1:{self._worker.call(serve_store, (), {}).value()}"
        self._store = connected_store(f"{self.place}/run")
        self._keys_of_its_own = self._store.num_keys()

    def call(self, world: World, rank: int) -> Call:
        """This rank's configure() here."""
        limit = LIMITS[self.how_it_ends]
        return world.start(rank, configure, f"{self.place}/run", rank, world.size, limit)

    def start(self, world: World, ranks: Sequence[int]) -> list[Call]:
        """The same of these ranks; returns when their records stand."""
        calls = [self.call(world, rank) for rank in ranks]
        for rank in ranks:
            wait_until(lambda key=str(rank): self._store.check([key]), f"record of rank {rank}")
        return calls

    def await_keys(self, count: int) -> None:
        count += self._keys_of_its_own
        wait_until(lambda: self._store.num_keys() >= count, f"{count} keys")

    def end(self) -> None:
        if self.how_it_ends == "dies":
            self._worker.kill()
        else:
            self._worker.freeze()


def assert_all_say_why_and_go_on(server: Server, world: World, calls: list[Call]) -> None:
    for call in calls:
        error = call.error(*KINDS[server.how_it_ends], patience=PATIENCE)
        assert f"the store at {server.place}" in error.text, error.text
        assert error.text.count(server.place) == 1, error.text
        assert error.fields["elapsed"] < TOLD_WITHIN, error.text
    world.next().run(check_sum)


@pytest.mark.parametrize("how", ["dies", "freezes"])
@pytest.mark.parametrize(("size", "late"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_store_that_ends_while_members_are_awaited_is_named_by_all(ranks, size, late, how):
    world = ranks.world(size)
    server = Server(ranks, world, how)
    calls = server.start(world, [rank for rank in range(size) if rank != late])
    server.end()
    calls.append(server.call(world, late))
    assert_all_say_why_and_go_on(server, world, calls)


@pytest.mark.parametrize("how", ["dies", "freezes"])
@pytest.mark.parametrize("size", [2, 3])
def test_store_that_ends_before_a_member_has_read_its_roster_is_named_by_all(ranks, size, how):
    world = ranks.world(size)
    server = Server(ranks, world, how)
    last = size - 1
    calls = server.start(world, [last])
    world.freeze(last)  # it has seen nobody, and sees its roster only when it is thawed
    calls += server.start(world, range(last))
    # records, and a roster for each but rank 0: connections form
    server.await_keys(size + size - 1)
    server.end()
    world.thaw(last)
    assert_all_say_why_and_go_on(server, world, calls)
