"""One rank of a group that C++ has made and Python adopts, and of one the other way round.

adoption.py LIBRARY PORT RANK SIZE: LIBRARY is adoption.cpp's
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import torchft_ext


def own(rank: int) -> torch.Tensor:
    """Make what a rank puts in."""
    return torch.tensor([rank + 1.0])


def check_collectives(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """Use torch's tables, and functional collectives by group and by name."""
    assert (group.rank(), group.size()) == (rank, size)
    tensor = own(rank)
    dist.broadcast(tensor, src=1, group=group)
    assert tensor.item() == 2.0
    for named in (group, "of-cpp"):
        assert funcol.all_reduce(own(rank), "sum", named).item() == size * (size + 1) / 2
        assert funcol.broadcast(own(rank), 1, named).item() == 2.0


def adopt_from_cpp(port: int, rank: int, size: int) -> None:
    """Adopt a group of C++'s, through two of its generations."""
    cpp = torch.ops.torchft_ext_adoption
    cpp.publish("of-cpp", port, rank, size)
    group = torchft_ext.adopt("of-cpp")
    check_collectives(group, rank, size)
    other = size - 1 - rank
    cpp.configure("of-cpp", port, other, size)
    assert torchft_ext.adopt("of-cpp") is group
    check_collectives(group, other, size)
    assert torchft_ext.backend(group).generation == 2
    tensor = own(rank)
    cpp.sum("of-cpp", tensor)
    assert tensor.item() == size * (size + 1) / 2
    cpp.end("of-cpp")


def give_to_cpp(port: int, rank: int, size: int) -> None:
    """Have C++ find groups that Python has made, and none of another library."""
    cpp = torch.ops.torchft_ext_adoption
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("ft", store=store, rank=rank, world_size=size)
    some = dist.new_group(list(range(size)))
    foreign = dist.new_group(list(range(size)), backend="gloo")
    for group in (dist.group.WORLD, some):
        assert group is not None
        assert cpp.size_of(group.group_name) == size
        tensor = own(rank)
        cpp.sum(group.group_name, tensor)
        assert tensor.item() == size * (size + 1) / 2
    assert cpp.size_of(foreign.group_name) == 0
    assert cpp.size_of("nobody's") == 0
    dist.destroy_process_group()


def main(library: str, port: str, rank: str, size: str) -> None:
    """Go both ways."""
    torch.ops.load_library(library)
    adopt_from_cpp(int(port), int(rank), int(size))
    give_to_cpp(int(port), int(rank), int(size))


if __name__ == "__main__":
    main(*sys.argv[1:])
