"""How is the job? Asked over the network by a process that takes no part in it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest
from elastic_side import come, jobs, members
from ports import free_ports
from ranks import World
from rankside import wait_until

from torchft_ext.elastic import _status_command

LIMIT = 60  # seconds
KEY = "known to all"
STEPS = 812

world = members(4)


@pytest.fixture(params=["store", "members"])
def place(request, ranks) -> tuple[str | None, list[str]]:
    """Where the job is found: an address, or those of its members."""
    if request.param == "store":
        return ranks.address(), []
    return None, [f"127.0.0.1:{port}" for port in free_ports(3)]


@dataclass
class Asked:
    """What the command has printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def arguments(place: tuple[str | None, list[str]], *options: str) -> list[str]:
    address, listed = place
    return [*([address] if address else ["--members", ",".join(listed)]), *options]


def ask(place: tuple[str | None, list[str]], *options: str, key: str = KEY) -> Asked:
    """The command in this process, which takes no part in any job."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("TORCHFT_EXT_ELASTIC_KEY", key)
        code = _status_command.main(arguments(place, *options))
    return Asked(code, out.getvalue(), err.getvalue())


def come_to(place: tuple[str | None, list[str]], number: int) -> str:
    address, listed = place
    listen = listed[number] if number < len(listed) else None
    options = {"members": listed, "listen": listen, "key": KEY} if listed else {}
    return come(address, 3, max_size=3, **options)


def begin() -> None:
    jobs[0].recover()
    jobs[0].count_steps(STEPS)


def wait_for_spare() -> None:
    wait_until(lambda: len(jobs[0].waiting()) == 1, "the spare")


def wait_for_place() -> None:
    jobs[0].recover()


def view_number() -> int:
    return jobs[0].view().number


@pytest.fixture
def job(ranks, world, place) -> tuple[World, World]:
    """Three members and a spare."""
    founders, spare = World(ranks, world.workers[:3]), World(ranks, world.workers[3:])
    calls = [founders.start(rank, come_to, place, rank) for rank in range(3)]
    for call in calls:
        call.value()
    founders.run(begin)
    spare.on(0, come_to, place, 3)
    spare.start(0, wait_for_place)
    founders.run(wait_for_spare)
    return founders, spare


def test_job_of_three_with_a_spare_tells_all_of_it(job, place):
    founders, spare = job
    asked = ask(place, "--json")
    state = json.loads(asked.stdout)
    report = state["report"]
    assert asked.returncode == 0 and state["silent"] == [] and report["by_role"] == "member"
    pids = [worker.pid for worker in founders.workers]
    assert sorted(member["pid"] for member in report["members"]) == sorted(pids)
    assert all(one["voter"] and one["answers"] and one["may_be_lost"] for one in report["members"])
    assert [one["pid"] for one in report["waiting"]] == [spare.workers[0].pid]
    assert (report["view"], report["size"], report["max_size"]) == (1, 3, 3)
    assert report["rule"] == "members" and report["may_lose"] == 1
    assert report["steps"]["committed"] == STEPS
    assert len(report["changes"][0]["joined"]) == 3
    assert state["meeting"]["founded"] and state["meeting"]["trouble"] == ""


def test_asking_changes_nothing(job, place):
    founders, _ = job
    for _ in range(3):
        assert ask(place).returncode == 0
    assert founders.run(view_number) == [1, 1, 1]
    founders.run(wait_for_spare)


def test_frozen_member_did_not_answer(job, place):
    """The first that is asked is the frozen one."""
    founders, _ = job
    first = json.loads(ask(place, "--json").stdout)["report"]["members"][0]["pid"]
    frozen = [worker.pid for worker in founders.workers].index(first)
    founders.freeze(frozen)
    try:
        state = json.loads(ask(place, "--json").stdout)
        text = ask(place).stdout
    finally:
        founders.thaw(frozen)
    by_pid = {one["pid"]: one["answers"] for one in state["report"]["members"]}
    assert by_pid == {w.pid: w.pid != first for w in founders.workers}
    assert [one["pid"] for one in state["silent"]] == [first]
    (row,) = [line for line in text.splitlines() if f" {first} " in line and " voter " in line]
    assert "did not answer" in row


def test_table_names_all(job, place):
    founders, spare = job
    lines = ask(place).stdout.splitlines()
    for worker in founders.workers:
        assert any(f" {worker.pid} " in line and " voter " in line for line in lines), lines
    assert any(f" {spare.workers[0].pid} " in line and " spare " in line for line in lines), lines
    assert any(line.startswith(f"step {STEPS},") for line in lines), lines


def agrees() -> bool:
    return jobs[0].agree(True).ok


def test_whom_the_member_that_answers_waits_for_is_told(job, place):
    founders, _ = job
    by = json.loads(ask(place, "--json").stdout)["report"]["by"]["pid"]
    late = next(rank for rank in range(3) if founders.workers[rank].pid != by)
    calls = [founders.start(rank, agrees) for rank in range(3) if rank != late]
    wait_until(lambda: "an agreement waits" in ask(place).stdout, "the wait")
    (line,) = json.loads(ask(place, "--json").stdout)["report"]["waits"]
    assert line.endswith(f"pid {founders.workers[late].pid}"), line
    assert founders.on(late, agrees) and all(call.value() for call in calls)
    assert json.loads(ask(place, "--json").stdout)["report"]["waits"] == []


def come_alone(listed: list[str]) -> None:
    come(None, 1, members=listed, listen=listed[0], key=KEY)
    jobs[0].recover()


def test_process_with_another_key_gets_nothing(world):
    listed = [f"127.0.0.1:{port}" for port in free_ports(1)]
    alone = World(world.pool, world.workers[:1])
    alone.on(0, come_alone, listed)
    assert ask((None, listed)).returncode == 0
    asked = ask((None, listed), "--json", key="another one")
    assert asked.returncode == 1
    state = json.loads(asked.stdout)
    assert state["report"] is None and not state["meeting"]["founded"]
    assert "does not know the job's key" in state["meeting"]["trouble"]


def come_and_lose(place: str) -> None:
    come(place, 3)
    jobs[0].recover()


def go_on() -> int:
    return jobs[0].recover().size


def test_change_is_told_with_its_cause(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:3])
    founders.run(come_and_lose, address)
    lost = founders.workers[2].pid
    founders.kill(2)
    calls = [founders.start(rank, go_on) for rank in (0, 1)]
    assert [call.value() for call in calls] == [2, 2]
    report = json.loads(ask((address, []), "--json").stdout)["report"]
    newest = report["changes"][0]
    assert newest["view"] == report["view"] and newest["size"] == 2
    (gone,) = newest["gone"]
    assert f"pid {lost} (its process ended)" in gone
    assert {"agree", "connect"} <= newest["phases"].keys(), newest


def test_job_whose_members_are_dead_does_not_answer(ranks, world):
    address = ranks.address()
    founders = World(ranks, world.workers[:3])
    founders.run(come_and_lose, address)
    for rank in range(3):
        founders.kill(rank)
    asked = ask((address, []))
    assert asked.returncode == 1 and asked.stdout.startswith("did not answer"), asked.stdout
    assert asked.stdout.count("asked in vain") == 3


def test_job_that_is_not_founded_says_who_has_come(ranks, world):
    address = ranks.address()
    World(ranks, world.workers[:1]).start(0, come, address, 2)
    ranks.await_key(address, "seats")
    asked = ask((address, []))
    assert asked.returncode == 1
    assert asked.stdout.startswith("not founded yet: 1 processes have come"), asked.stdout
    World(ranks, world.workers[1:2]).on(0, come, address, 2)


def test_store_that_is_not_there_is_told_in_time():
    (port,) = free_ports(1)
    asked = ask((f"127.0.0.1:{port}/job", []), "--timeout", "3")
    assert asked.returncode == 1 and asked.stdout.startswith("not known"), asked.stdout


def test_command_runs_as_a_program(ranks, rank_env):
    command = [sys.executable, "-m", "torchft_ext.elastic", "status", ranks.address()]
    asked = subprocess.run(command, env=rank_env, capture_output=True, text=True, timeout=LIMIT)
    assert asked.returncode == 1, asked.stderr
    assert asked.stdout.startswith("not founded yet: 0 processes have come"), asked.stdout


def test_watch_looks_again_until_it_is_interrupted(ranks, monkeypatch):
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(_status_command.time, "sleep", pause)
    asked = ask((ranks.address(), []), "--watch", "5")
    assert asked.returncode == 0 and pauses == [5, 5]
    assert asked.stdout.count("not founded yet") == 2


def test_bad_arguments_are_told():
    asked = ask(("nowhere", []))
    assert asked.returncode == 1 and "expected" in asked.stderr
