"""<torchft_ext/c.h> has all of <torchft_ext/comm.h>, as its page and its head say.

Compared are the texts of the headers: a function, an argument, a field or a number that comes to
one of them has to come to the other.
"""

from __future__ import annotations

import re

import pytest
from test_language_options import HEADERS, fields_of, text_of

CPP, C, FAILURE = text_of("comm.h"), text_of("c.h"), text_of("failure.h")


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def names_in(parameters: str) -> list[str]:
    """Return the names of parameters, without their types and defaults."""
    plain = re.sub(r"\([^()]*\)", "", parameters)
    return [match for match in re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", plain) if match != "void"]


def methods_of(name: str) -> dict[str, list[str]]:
    """Return the methods of a class of comm.h, and the names of their parameters."""
    body = re.search(rf"class {name} \{{(.*?)\n private:", CPP, re.DOTALL)
    assert body is not None
    found = re.findall(
        r"\b(\w+)\(((?:[^()]|\([^()]*\))*)\)(?: const)?(?: noexcept)?;", body.group(1)
    )
    return {
        method: names_in(parameters)
        for method, parameters in found
        if method != name and not method.startswith("operator")
    }


def functions_of_c() -> dict[str, list[str]]:
    found = re.findall(r"\b(tft_\w+)\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\);", C)
    return {name: names_in(parameters) for name, parameters in found}


# A method that returns the failure and one that throws it are one function in C, with a status.
SAME = {"tryConfigure": "configure", "tryCheck": "check", "tryWait": "wait"}
OPERATIONS = {"allreduce", "broadcast", "allgather", "reduceScatter", "reduce", "gather", "scatter",
              "alltoall", "barrier", "send", "recv"}  # fmt: skip
ARGUMENT = {"timeout": "timeout_ms"}
# Where C's arguments are not those of C++ with a handle before and an error behind.
ARGUMENTS = {"tft_comm_stats": ["comm", "stats", "error"],
             "tft_comm_on_failure": ["comm", "context", "error"]}  # fmt: skip
NO_ERROR = {"tft_comm_rank", "tft_comm_size", "tft_comm_generation", "tft_request_done",
            "tft_request_source"}  # fmt: skip


@pytest.mark.parametrize("method", sorted(methods_of("Comm")))
def test_a_method_of_comm_is_a_function_of_c(method: str) -> None:
    arguments = ["comm", *(ARGUMENT.get(name, name) for name in methods_of("Comm")[method])]
    name = f"tft_comm_{snake(SAME.get(method, method))}"
    if method in OPERATIONS:
        name = f"tft_{snake(method)}"
        arguments.append("request")
    if name not in NO_ERROR:
        arguments.append("error")
    assert functions_of_c()[name] == ARGUMENTS.get(name, arguments)


@pytest.mark.parametrize("method", sorted(methods_of("Request")))
def test_a_method_of_request_is_a_function_of_c(method: str) -> None:
    name = f"tft_request_{snake(SAME.get(method, method))}"
    assert functions_of_c()[name] == ["request", *([] if name in NO_ERROR else ["error"])]


def test_functions_of_cpp_are_functions_of_c() -> None:
    functions = set(functions_of_c())
    free = set(re.findall(r"^(?:size_t|bool|void) (\w+)\(", CPP + text_of("log.h"), re.MULTILINE))
    assert free == {"sizeOf", "dump", "endProcess", "setLogSink", "setLogLevel"}
    assert {f"tft_{snake(name)}" for name in free} <= functions
    stores = set(re.findall(r"\bmake(\w+)Store\(", text_of("store.h")))
    assert {f"tft_store_create_{snake(name)}" for name in stores} <= functions


def test_counts_of_cpp_are_counts_of_c() -> None:
    in_c = set(fields_of("c.h", "tft_stats")) - {"phases"}  # the length of an array
    cpp = re.search(r"struct CommStats \{(.*?)\n\}", CPP, re.DOTALL)
    assert cpp is not None
    assert {re.sub(r"\[\d+\]", "", name) for name in in_c} | {"last_configure"} == set(
        re.findall(r"(\w+)(?: = 0)?;", cpp.group(1))
    )


# Of a failure: what C's error has under another name, and what is for this library's own messages.
IN_ERROR = {"kind": "status", "op": "operation", "elapsed": "elapsed_ns", "limit": "limit_ns"}
IN_MESSAGE = {"cause", "group", "size", "seq", "needs_new_group", "in_job", "at", "silent_for"}


def test_an_error_of_c_says_what_a_failure_says() -> None:
    structs = re.findall(r"struct (?:Cause|Failure) \{(.*?)\n\}", FAILURE, re.DOTALL)
    failure = set(re.findall(r"(\w+)(?: = [^;]*|\{[^;]*\})?;", "".join(structs))) - {"const"}
    error = re.search(r"typedef struct tft_error \{(.*?)\}", C, re.DOTALL)
    assert error is not None
    in_c = set(re.findall(r"(\w+)(?:\[\d+\])?;", error.group(1)))
    assert in_c == {IN_ERROR.get(name, name) for name in failure - IN_MESSAGE} | {"message"}


def numbers_of(text: str, name: str) -> dict[str, int]:
    body = re.search(rf"enum (?:class )?{name}(?: : \w+)? \{{(.*?)\}}", text, re.DOTALL)
    assert body is not None, name
    return {each: int(number) for each, number in re.findall(r"(\w+) = (\d+)", body.group(1))}


@pytest.mark.parametrize(
    ("cpp", "c", "prefix", "text"),
    [
        ("DataType", "tft_type", "TFT_", CPP),
        ("Reduction", "tft_reduction", "TFT_", CPP),
        ("LogLevel", "tft_log_level", "TFT_LOG_", text_of("log.h")),
    ],
)
def test_numbers_of_cpp_are_numbers_of_c(cpp: str, c: str, prefix: str, text: str) -> None:
    spelled = {"bfloat16": "bfloat16", "b_float16": "bfloat16"}
    expected = {}
    for name, number in numbers_of(text, cpp).items():
        word = snake(name[1:])
        expected[prefix + spelled.get(word, word).upper()] = number
    assert numbers_of(C, c) == expected


def test_kinds_of_failures_are_statuses_of_c() -> None:
    statuses = {
        name: number for name, number in numbers_of(C, "tft_status").items() if number < 100
    }
    kinds = numbers_of(FAILURE, "FailureKind")
    assert statuses == {"TFT_OK": 0, **{f"TFT_{snake(k[1:]).upper()}": n for k, n in kinds.items()}}


def test_every_header_says_that_c_has_the_same() -> None:
    text = " ".join((HEADERS / "comm.h").read_text().replace("//", "").split())
    assert "torchft_ext/c.h offers the same to C programs" in text
