"""torchft_ext.elastic.manual_seed(): random numbers by seed, step and rank."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import torch

from torchft_ext import elastic


def drawn() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def drawn_for(*numbers: int) -> tuple[float, float]:
    elastic.manual_seed(*numbers)
    return drawn()


def test_the_same_step_and_rank_draw_the_same_whatever_was_drawn_before():
    first = drawn_for(1, 5, 2)
    drawn()
    assert drawn_for(1, 5, 2) == first


def test_seeds_steps_and_ranks_draw_differently():
    numbers = list(itertools.product(range(3), repeat=3))
    for place in (0, 1):  # torch, Python
        assert len({drawn_for(*each)[place] for each in numbers}) == len(numbers)


def test_numpy_is_seeded_where_it_is_imported():
    program = (
        "import sys; from torchft_ext import elastic\n"
        "import numpy; elastic.manual_seed(1, 2, 3); a = numpy.random.rand()\n"
        "elastic.manual_seed(1, 2, 3); assert a == numpy.random.rand()\n"
        "elastic.manual_seed(1, 2, 4); assert a != numpy.random.rand()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_generator_leaves_the_global_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = torch.rand(3, generator=elastic.generator(1, 2, 3))
    assert torch.equal(first, torch.rand(3, generator=elastic.generator(1, 2, 3)))
    assert not torch.equal(first, torch.rand(3, generator=elastic.generator(1, 2, 4)))
    assert torch.equal(before, torch.get_rng_state())
