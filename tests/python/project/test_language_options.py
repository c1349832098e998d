"""What a program may choose is the same in Python, C++ and C, and so are its defaults.

Read from the headers and from Python's signatures: an option, a method or a field that one language
lacks is named here, with the reason.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

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
    "on_no_quorum": (ABSENT, "raise", "C++: the program decides on a NoQuorum error itself"),
    "step_timeout": (None, ABSENT, "Python: of steps()"),
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


# ---- what a job's methods take, and return

# By C++'s method: Python's, and what Python calls the arguments that have another name there.
JOB: dict[str, tuple[str, dict[str, str]]] = {
    "abort": ("abort", {"why": "reason"}),
    "agree": ("agree", {}),
    "countSteps": ("count_steps", {}),
    "end": ("end", {"timeout": ABSENT}),  # C++: False says that it is not on record by then
    "isOver": ("is_over", {}),
    "leave": ("close", {"timeout": ABSENT}),  # C++: False says that it was not done by then
    "manage": ("manage", {}),
    "recover": ("recover", {}),
    "setLeaving": ("leave", {}),
    "waiting": ("waiting", {}),
}
PYTHON_ALONE = {
    "rule": "an argument of manage(): it names members by Python's View",
    "make_group": "the same",
    "managed_group": "the same",
    "patience": "an argument of recover(): a field of RecoverOptions",
    "without_quorum": "the same",
    "view": "recover() returns it",
    "id": "View::members",
    "name_of": "for messages of steps()",
    "is_leaving": "of steps()",
    "await_frozen": "of steps()",
    "check": "of steps()",
    "hold_groups": "of steps()",
    "hold_shard": "of steps()",
    "log": "of steps()",
    "agreed": "an argument of end(): of steps()",
    "has_ended": "of run()",
    "away_for": "of run()",
    "wait_at_most": "of steps()",
}


def methods_of_job() -> dict[str, list[str]]:
    """Return the methods of elastic::Job, and the names of their parameters."""
    body = re.search(r"class Job \{(.*?)\n private:", text_of("torch/elastic.h"), re.DOTALL)
    assert body is not None
    found: dict[str, list[str]] = {}
    for name, parameters in re.findall(
        r"\b(\w+)\(((?:[^()]|\([^()]*\))*)\)(?: const)?;", body.group(1)
    ):
        plain = re.sub(r"\([^()]*\)", "", parameters)
        names = re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", plain)
        if name not in ("Job", "join") and names != ["options"]:
            found[name] = names
    return found


@pytest.mark.parametrize("name", sorted({*methods_of_job(), *JOB}))
def test_a_method_of_a_job_takes_the_same(name: str) -> None:
    method, called = JOB[name]
    arguments = [called.get(each, each) for each in methods_of_job()[name]]
    expected = [each for each in arguments if each != ABSENT]
    found = parameters_of(getattr(elastic.Job, method))
    assert expected == [each for each in found if each not in PYTHON_ALONE]


def test_python_has_no_method_of_a_job_that_is_not_named_here() -> None:
    methods = {name for name in vars(elastic.Job) if not name.startswith("_")}
    assert methods - {method for method, _ in JOB.values()} <= set(PYTHON_ALONE)


def members_of(name: str) -> set[str]:
    """Return the names of the fields of a struct of elastic.h."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}}", text_of("torch/elastic.h"), re.DOTALL)
    assert body is not None
    return set(re.findall(r"(\w+)(?: = [^;]*|\{\})?;", body.group(1))) - {"const"}


def test_answers_and_views_have_the_same_fields() -> None:
    answer = {field.name for field in dataclasses.fields(elastic.Answer)}
    assert members_of("Answer") == answer
    view = {field.name for field in dataclasses.fields(elastic.View)}
    # `continuing` is by rank in C++, where Python has this member's alone.
    assert members_of("View") | {"members_continuing", "founder"} == view


# ---- of DistributedDataParallel

# Arguments of torch's that are no options of C++, and what stands for them.
NO_DDP_OPTION = {
    "module": "an argument of its own",
    "process_group": "the same",
    "bucket_cap_mb": "bucket_bytes",
    "bucket_cap_mb_list": "bucket_bytes, one size for all",
    "device_ids": "a module is on one device",
    "output_device": "the same",
    "dim": "the same",
    "check_reduction": "torch ignores it",
    "device_mesh": "a group is given",
    "static_graph": "not there yet",
    "delay_all_reduce_named_params": "not there yet",
    "param_to_hook_all_reduce": "not there yet",
    "mixed_precision": "not there yet",
    "skip_all_reduce_unused_params": "not there yet",
    "batched_grad_copy": "not there yet",
    "forward_sync_buffers": "broadcast_buffers",
}


def test_ddp_has_the_options_of_torchs() -> None:
    cpp = fields_of("torch/ddp.h", "DdpOptions")
    assert cpp.pop("bucket_bytes") is None
    python = parameters_of(DistributedDataParallel.__init__)
    if python["broadcast_buffers"] is None:  # torch 2.13: which means True
        python["broadcast_buffers"] = True
    assert {name: python.get(name, ABSENT) for name in cpp} == cpp
    assert set(python) - set(cpp) <= set(NO_DDP_OPTION)


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
FOR_TENSORS = {
    "engine",
    "nan_check",
    "device",
    "poison",
    "high_priority_stream",
    "blocking_wait",
    "staged",
}
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
