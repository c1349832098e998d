"""The real torchft, its lighthouse and its Managers, on this package's groups and on its own."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ranks import PATIENCE, Died, Pool, World, values_of

pytest.importorskip("torchft", reason="torchft is not installed: scripts/check_torchft.sh")

import torchft.process_group
from torchft.coordination import LighthouseServer
from torchft_replica import (
    Job,
    Outcome,
    doubled,
    serve,
    sessions,
    train,
    weights_without_torchft,
)
from torchft_sharded import SHARDS, train_sharded

from torchft_ext import process_group as ours

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "torchft_ddp.py"
RECOVERY = ROOT / "benchmarks" / "recovery.py"
DEATH_AT = 2  # the step in which a replica dies


@contextmanager
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=2_000
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


def with_a_death(ranks: Pool, group: str, **options: object) -> list[Outcome]:
    """Three replicas; the last is killed, and another process takes its place."""
    world = World(ranks, ranks.borrow(4))
    with lighthouse() as address:
        job = Job(address, ranks.address(), group, wait_at=DEATH_AT + 1, **options)
        victim = world.start(2, train, job, 2, DEATH_AT)
        calls = [world.start(rank, train, job, rank) for rank in range(2)]
        with pytest.raises(Died):
            victim.value(PATIENCE)
        calls.append(world.start(3, train, job, 2, newcomer=True))
        return values_of(calls, PATIENCE)


def without_failures(ranks: Pool, group: str, kind: str, last: int) -> Outcome:
    """One replica alone, to the same step."""
    world = World(ranks, ranks.borrow(1))
    with lighthouse() as address:
        job = Job(address, ranks.address(), group, kind, replicas=1, last=last)
        return world.on(0, train, job, 0)


def check(outcomes: list[Outcome], expected: list[float]) -> None:
    assert [one.step for one in outcomes] == [outcomes[0].step] * 3
    assert outcomes[2].healed
    for one in outcomes:
        assert one.weights == pytest.approx(expected, rel=1e-9)


def test_example_says_what_its_page_says():
    run = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stdout + run.stderr
    line = r"replica \d: 20 steps, the last with 2 replicas; the sum of the weights is (-?\d+\.\d+)"
    sums = re.findall(line, run.stdout)
    assert len(sums) == 2 and sums[0] == sums[1], run.stdout
    assert "exit codes: [0, -9, 0]" in run.stdout


@pytest.mark.parametrize("group", ["torchft.Gloo", "Host", "Gloo", "BabyHost", "swallowing Host"])
def test_ddp_with_a_death_ends_as_without(ranks, group):
    outcomes = with_a_death(ranks, group)
    check(outcomes, without_failures(ranks, group, "ddp", outcomes[0].step).weights)
    assert sum(one.failed for one in outcomes[:2]) > 0


@pytest.mark.parametrize("group", ["Host", "Gloo", "BabyHost"])
def test_newcomer_is_healed_over_the_group(ranks, group):
    outcomes = with_a_death(ranks, group, transport="group")
    check(outcomes, without_failures(ranks, group, "ddp", outcomes[0].step).weights)


@pytest.mark.parametrize("group", ["torchft.Gloo", "Host", "Gloo", "BabyGloo"])
def test_diloco_with_a_death_ends_as_without(ranks, group):
    outcomes = with_a_death(ranks, group, kind="diloco")
    check(outcomes, without_failures(ranks, group, "diloco", outcomes[0].step).weights)


@pytest.mark.parametrize("group", ["torchft.Gloo", "Host", "Gloo"])
def test_streaming_diloco_with_a_death_goes_on_alike_on_all(ranks, group):
    """A sum that failed is repeated for its fragment alone, so no run without failures is its
    like."""
    outcomes = with_a_death(ranks, group, kind="streaming")
    check(outcomes, outcomes[0].weights)


@pytest.mark.parametrize("group", ["torchft.Gloo", "Host", "Gloo"])
def test_local_sgd_with_a_death_ends_as_without_torchft(ranks, group):
    outcomes = with_a_death(ranks, group, kind="local_sgd")
    assert [one.batches for one in outcomes] == [outcomes[0].batches] * 3
    check(outcomes, weights_without_torchft(outcomes[0].batches))


@pytest.mark.parametrize("group", ["torchft.Gloo", "Host", "Gloo"])
def test_fsdp_in_replicas_of_two_shards_with_a_death_ends_as_without(ranks, group):
    """Two replicas; the second is lost whole, and two other processes take its place."""
    world = World(ranks, ranks.borrow(3 * SHARDS))
    with lighthouse() as address:
        job = Job(address, ranks.address(), group, "fsdp", replicas=2, wait_at=DEATH_AT + 1)
        victims = [world.start(2 + i, train_sharded, job, "second", i, DEATH_AT) for i in (0, 1)]
        calls = [world.start(shard, train_sharded, job, "first", shard) for shard in (0, 1)]
        for victim in victims:
            with pytest.raises(Died):
                victim.value(PATIENCE)
        calls += [world.start(4 + i, train_sharded, job, "third", i, newcomer=True) for i in (0, 1)]
        outcomes = values_of(calls, PATIENCE)
    assert [one.step for one in outcomes] == [outcomes[0].step] * 4
    assert [one.healed for one in outcomes] == [False, False, True, True]
    expected = weights_without_torchft(outcomes[0].step, "fsdp")
    for one in outcomes:
        assert one.weights == pytest.approx(expected, rel=1e-9)
    assert outcomes[0].failed == outcomes[1].failed > 0


def test_recovery_is_measured_under_managers_beside_the_others(tmp_path):
    written = tmp_path / "recovery.json"
    brief = ["--world=2", "--kills=1", "--torchft-kills=2", "--resident=300M", f"--json={written}"]
    scenarios = ["running", "torchft", "torchft-ft"]
    command = [sys.executable, RECOVERY, *brief, f"--scenarios={','.join(scenarios)}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(written.read_text())["results"]
    assert [result["scenario"] for result in results] == scenarios
    for result in results[1:]:
        assert run.stdout.count(f"| {result['scenario']}, 2 ranks |") == 1
        assert len(result["rounds"]) == 2
        for one in result["rounds"]:
            parts = one["phases_s"]
            assert list(parts) == ["detect", "release", "agree", "connect", "allreduce"]
            assert sum(parts.values()) == pytest.approx(one["last_good_s"], abs=1e-6)
            assert one["victim_resident_bytes"] >= 300 * 2**20
    assert all(one["cause_named_by_all"] for one in results[2]["rounds"])


def own_tests(group: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tests = Path(torchft.process_group.__file__).with_name("process_group_test.py")
    plugin = ["-p", "torchft_names", "-o", f"cache_dir={folder}"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-q", *arguments, tests],
        cwd=Path(__file__).parent,
        env={**os.environ, "TORCHFT_EXT_TEST_GROUP": group},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )


@pytest.mark.parametrize("group", ["Host", "Gloo"])
def test_torchfts_own_tests_of_its_groups_pass_on_ours(tmp_path, group):
    """All for the CPU but two (torchft_names.py): forms, wrappers, and each collective by three
    threads as ranks, also with one that shuts down when it is through. They have limits of seconds,
    or of hundredths, which pass on a machine with much else to do: what failed has a second go."""
    run = own_tests(group, tmp_path)
    counts = Counter({what: int(count) for count, what in re.findall(r"(\d+) (\w+)", run.stdout)})
    assert counts["passed"] + counts["failed"] == 45, run.stdout
    assert (counts["deselected"], counts["skipped"]) == (2, 38), run.stdout
    if run.returncode != 0:
        print(run.stdout)
        run = own_tests(group, tmp_path, "--last-failed")
    assert run.returncode == 0, run.stdout + run.stderr


def public_calls(cls: type) -> Iterator[tuple[str, inspect.Signature]]:
    """The constructor and the public methods that torchft's class has, inherited ones too."""
    names = {
        name for one in cls.__mro__ if one.__module__.startswith("torchft.") for name in vars(one)
    }
    for name in sorted(names):
        method = getattr(cls, name)
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            yield name, inspect.signature(method)


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """None: one of torch's own, in C++, which has all of torch's forms."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


SHARED = [name for name in ours.__all__ if hasattr(torchft.process_group, name)]


@pytest.mark.parametrize("name", SHARED)
def test_what_calls_torchft_calls_this_package(name):
    """By position and by name, with all arguments and with those that are needed."""
    theirs, own = getattr(torchft.process_group, name), getattr(ours, name)
    is_class = inspect.isclass(theirs)
    calls = list(public_calls(theirs)) if is_class else [("", inspect.signature(theirs))]
    assert calls
    for method, signature in calls:
        assert not method or hasattr(own, method), f"{name} lacks {method}"
        accepting = signature_of(getattr(own, method) if method else own)
        if accepting is None:
            continue
        every = list(signature.parameters.values())
        needed = [one for one in every if one.default is inspect.Parameter.empty]
        for given in (every, needed):
            plain = [one.name for one in given if one.kind is one.POSITIONAL_OR_KEYWORD]
            accepting.bind(*plain)
            first, named = (plain[:1], plain[1:]) if is_class else ([], plain)
            accepting.bind(*first, **dict.fromkeys(named, 0))


@pytest.mark.parametrize("group", ["BabyHost", "BabyGloo", "Dummy"])
def test_torchfts_own_test_of_functional_collectives_passes_on_our_other_groups(tmp_path, group):
    run = own_tests(group, tmp_path, "-k", "test_functional_collectives")
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr


def test_parameter_server_outlives_a_client(ranks):
    world = World(ranks, ranks.borrow(3))
    address = world.on(0, serve)
    assert world.on(1, doubled, address) == [2.0, 4.0]
    world.kill(1)
    assert world.on(2, doubled, address) == [2.0, 4.0]
    assert world.on(0, sessions) == 2
    for rank in (0, 2):  # torchft's server cannot be ended
        world.kill(rank)
