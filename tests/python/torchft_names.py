"""A plugin of pytest: puts this package's process groups in the place of torchft's, of the same
names, for torchft's own tests. TORCHFT_EXT_TEST_GROUP says which stand for its Gloo and BabyGloo:
"Host" or "Gloo".
"""

from __future__ import annotations

import os

import pytest
import torchft.process_group as theirs

from torchft_ext import _pg_base, _pg_store, _pg_wrappers
from torchft_ext import process_group as ours

for _name in ours.__all__:
    if hasattr(theirs, _name):
        setattr(theirs, _name, getattr(ours, _name))
_group = os.environ["TORCHFT_EXT_TEST_GROUP"]
theirs.ProcessGroupGloo = getattr(ours, f"ProcessGroup{_group}")
theirs.ProcessGroupBabyGloo = getattr(ours, f"ProcessGroupBaby{_group}")
theirs._ErrorSwallowingWork = _pg_wrappers._SwallowingWork


class _Stores:
    """As a test replaces them in torchft's module."""

    def __getattr__(self, name: str) -> object:
        return getattr(theirs, name)


_pg_store.dist = _Stores()

# What looks at other things than a group does.
_OF_THEIRS = {
    "test_functional_collectives": "the number that torch.distributed.new_group() gives as a name",
    "test_reconfigure_baby_process_group": "private attributes: a thread, a pipe and a process",
    "test_baby_gloo_apis": "its last line: an OSError of a closed pipe",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if item.name in _OF_THEIRS]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        module._DummyWork = type(_pg_base.finished([]))
