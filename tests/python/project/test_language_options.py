"""What a program may choose is the same in Python, C++ and C, and so are its defaults.

Read from the headers and from Python's signatures: an option that one language lacks is named here,
with the reason.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import torchft_ext
from torchft_ext import elastic

HEADERS = Path(__file__).resolve().parents[3] / "csrc" / "include" / "torchft_ext"

ABSENT = "absent"
TIMES = {"milliseconds": 1, "seconds": 1000, "minutes": 60_000}
UNSET = {"std::nullopt": None, "{}": "", '""': ""}


def text_of(header: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", (HEADERS / header).read_text(), flags=re.DOTALL)


def fields_of(header: str, name: str) -> dict[str, object]:
    """Return the fields of a struct of options, and their defaults; times in milliseconds."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}}", text_of(header), re.DOTALL)
    assert body is not None, f"{header} has no struct {name}"
    found: dict[str, object] = {}
    for field in body.group(1).split(";"):
        match = re.match(
            r"[\w:<>,\s*]+?\s\*?(\w+)\s*(?:=\s*(.+)|(\{.*\}))?$", " ".join(field.split())
        )
        if match is not None:
            found[match.group(1)] = default_of((match.group(2) or match.group(3) or "").strip())
    return found


def default_of(text: str) -> object:
    time = re.fullmatch(r"std::chrono::(\w+)\((\d+)\)", text)
    if time is not None:
        return TIMES[time.group(1)] * int(time.group(2))
    if text in UNSET:
        return UNSET[text]
    if re.fullmatch(r"\{?-?\d+\}?", text):
        return int(text.strip("{}"))
    return {"true": True, "false": False}.get(text, text.strip('"'))


def parameters_of(function: Callable[..., object]) -> dict[str, object]:
    """The same of a Python function."""
    given = inspect.signature(function).parameters.values()
    return {each.name: plain(each.default) for each in given if each.name != "self"}


def plain(default: object) -> object:
    if isinstance(default, timedelta):
        return default // timedelta(milliseconds=1)
    return "required" if default is inspect.Parameter.empty else default


# ---- of a job

# C++'s value, Python's, why.
JOIN_DIFFERS = {
    "address": ("", None, "a text in C++"),
    "size": (1, "required", "a struct has a default for each field"),
    "min_size": (0, None, "0 stands for None: size"),
    "max_size": (65536, None, "what None stands for"),
    "listen": ("", None, "a text in C++"),
    "members": ("", (), "a list without members"),
    "store_rule": (False, ABSENT, 'Python: rule, "members" or "store"'),
    "rule": (ABSENT, "members", "C++: store_rule"),
    "wait": (ABSENT, False, "C++: recover() before rank and size are asked for"),
    "backend": (ABSENT, "ft", "C++: GroupOptions::engine of the groups that it manages"),
}


@pytest.mark.parametrize("name", sorted({*parameters_of(elastic.join), *JOIN_DIFFERS}))
def test_an_option_of_join_is_the_same_in_cpp(name: str) -> None:
    cpp, python = fields_of("torch/elastic.h", "JoinOptions"), parameters_of(elastic.join)
    found = cpp.get(name, ABSENT), python.get(name, ABSENT)
    assert found == JOIN_DIFFERS.get(name, (found[1], found[1], ""))[:2]


def test_cpp_has_no_option_of_join_that_python_lacks() -> None:
    assert set(fields_of("torch/elastic.h", "JoinOptions")) <= {
        *parameters_of(elastic.join),
        *JOIN_DIFFERS,
    }


def test_recover_has_the_same_options() -> None:
    cpp = fields_of("torch/elastic.h", "RecoverOptions")
    python = parameters_of(elastic.Job.recover)
    assert cpp == {"timeout": 0, "patience": None, "without_quorum": False}
    assert python == {"timeout": None, "patience": None, "without_quorum": False}


# ---- of a group

# In C++ a group has a name, an engine and a device among its options; in Python these are arguments
# of make_group(). Its timeout is 30 minutes there too.
MAKE_GROUP = {"name": "group", "engine": "ft", "device": None, "timeout": 30 * 60_000}


def test_groups_have_the_same_options() -> None:
    cpp = fields_of("torch/process_group.h", "GroupOptions")
    assert {**options_of_python(), **MAKE_GROUP} == cpp


def options_of_python() -> dict[str, object]:
    """Return those of an Options object that chooses nothing."""
    names = [
        name
        for name in vars(torchft_ext.Options)
        if isinstance(vars(torchft_ext.Options)[name], property)
    ]
    nothing = torchft_ext.Options()
    return {name: getattr(nothing, name) for name in names}


# Of groups on plain memory: what is for tensors, or for devices, is not there.
FOR_TENSORS = {"engine", "nan_check", "device", "poison", "high_priority_stream", "blocking_wait"}
# What is unset in GroupOptions has these values, which docs/contract.md has too.
PLAIN = {"name": "comm", "interface": "", "port_range": "", "local_sockets": True}


def test_groups_on_plain_memory_have_the_same_options() -> None:
    cpp = fields_of("torch/process_group.h", "GroupOptions")
    plain_memory = fields_of("comm.h", "CommOptions")
    assert set(plain_memory) == set(cpp) - FOR_TENSORS
    assert plain_memory == {
        "timeout": cpp["timeout"],
        "heartbeat": 5000,
        "ask_after": 1000,
        **PLAIN,
    }


# Zero and NULL stand for the default, so what is on by default is turned off.
IN_C = {
    "timeout": "timeout_ms",
    "interface": "interface_name",
    "local_sockets": "no_local_sockets",
    "heartbeat": "heartbeat_ms",
    "ask_after": "ask_after_ms",
}


def test_c_has_the_options_of_groups_on_plain_memory() -> None:
    in_c = fields_of("c.h", "tft_options")
    assert list(in_c) == [IN_C.get(name, name) for name in fields_of("comm.h", "CommOptions")]
