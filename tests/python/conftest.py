"""The ranks that all tests share, and what every test leaves behind: nothing."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

import folders

sys.path[:0] = folders.of_python_tests()

from baby_side import baby  # noqa: E402, F401  (a fixture)
from device_worlds import device_pool, devices, non_blocking_pool  # noqa: E402, F401  (fixtures)
from ranks import Pool  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "only tests of worlds of N ranks; 0: only those that are not run in several sizes"
    parser.addoption("--ranks", type=int, metavar="N", help=text)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and measures(item.function):
            item.add_marker("alone")
    wanted = config.getoption("--ranks")
    if wanted is None:
        return
    chosen = [item for item in items if size_of(item) == wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@cache
def measures(function: Callable[..., object]) -> bool:
    """Whether a test asserts a promise of time, and so needs the machine for itself."""
    return "assert_within(" in inspect.getsource(function)


def size_of(item: pytest.Item) -> int:
    """The parameter `size` of a test; 0 where it has none."""
    call = getattr(item, "callspec", None)
    size = call.params.get("size", 0) if call is not None else 0
    return int(size)


def rank_environment() -> dict[str, str]:
    import torchft_ext

    package_parent = str(Path(torchft_ext.__file__).parent.parent)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHFT_EXT_")}
    for name in ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    paths = [*folders.of_python_tests(), package_parent, env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env["OMP_NUM_THREADS"] = "1"
    # torch looks the peer up when a store client connects: no test waits 5 s for a name server
    # that does not answer (resolv.conf(5)).
    env["RES_OPTIONS"] = "timeout:1 attempts:1"
    # A rank of a busy machine may stall for seconds; the tests of freezing set limits of their own.
    env["TORCHFT_EXT_HEARTBEAT"] = "30"
    return env


@pytest.fixture(scope="session")
def rank_env() -> dict[str, str]:
    return rank_environment()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, rank_env: dict[str, str]) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("ranks"), rank_env)
    yield pool
    pool.close()


@pytest.fixture
def store() -> dist.TCPStore:
    """A store in this process."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ranks(pool: Pool) -> Iterator[Pool]:
    """The pool; whatever a test did to its workers is made good after it."""
    yield pool
    pool.discard_unusable()
