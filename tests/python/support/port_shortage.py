"""A program for namespaces.py: a host has one local port left, and a group needs two of them."""

from __future__ import annotations

import os
from pathlib import Path

from ranks import Pool, World, values_of
from rankside import configure, connected_store, failure_of, leave_default_group, seconds
from values import check_sum

OWN_PORTS = "20000-20100"  # for listeners
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def begin(address: str, rank: int, size: int) -> None:
    import torch.distributed as dist

    import torchft_ext

    leave_default_group()
    options = torchft_ext.Options(local_sockets=False, port_range=OWN_PORTS)
    dist.init_process_group(
        "ft",
        store=connected_store(address),
        rank=rank,
        world_size=size,
        timeout=seconds(20),
        pg_options=options,
    )


def begin_again(address: str, rank: int, size: int) -> tuple[str, float]:
    error = failure_of(lambda: configure(address, rank, size, 20.0))
    assert error is not None
    return error.text, float(str(error.fields["elapsed"]))


def all_run(pool: Pool, world: World, function) -> list:
    address = pool.address()
    calls = [world.start(rank, function, address, rank, world.size) for rank in range(world.size)]
    return values_of(calls)


def main(folder: Path) -> dict:
    pool = Pool(folder, dict(os.environ))
    world = World(pool, pool.borrow(2))
    all_run(pool, world, begin)
    usual = RANGE.read_text()
    RANGE.write_text("40000 40000")
    told = all_run(pool, world, begin_again)
    RANGE.write_text(usual)
    world.next().run(check_sum)
    pool.close()
    return {
        "errors": [text for text, _ in told],
        "elapsed": [elapsed for _, elapsed in told],
        "works_on": True,
    }
