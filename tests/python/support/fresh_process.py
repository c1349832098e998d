"""A process that has imported nothing but torch, and a forked child of it for each case.

A fresh interpreter costs seconds; forking one that has started no thread costs nothing.
Usage: python -m fresh_process MODULE FUNCTION CASE...
Prints {case: [ok, value or error]} as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback

import torch  # noqa: F401 - what every case starts from

LIMIT = 90  # seconds, for all cases together


def run_cases(module: str, function: str, cases: list[str], env: dict[str, str]) -> dict:
    """Called by tests: the values of the cases; raises for the first that failed."""
    command = [sys.executable, "-m", "fresh_process", module, function, *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for case, (ok, value) in results.items():
        assert ok, f"{case}: {value}\n{done.stderr}"
    return {case: value for case, (_, value) in results.items()}


def run_in_child(module: str, function: str, case: str) -> list:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            value = getattr(importlib.import_module(module), function)(case)
            result = [True, value]
        except BaseException:
            result = [False, traceback.format_exc()]
        with os.fdopen(writing, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else [False, "the child ended without an answer"]


if __name__ == "__main__":
    name, function_name, *names = sys.argv[1:]
    print(json.dumps({case: run_in_child(name, function_name, case) for case in names}))
