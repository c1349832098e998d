"""The record of operations: a file for each generation that fails, and one on demand."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Worker, World, values_of
from rankside import (
    PATIENCE,
    abort,
    backend,
    configure_next,
    failure_of,
    seconds,
    wait_errored,
    wait_until,
)

import torchft_ext

MOST = 4  # ranks of the worlds here
PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
SHORT_LIMIT = 2.0  # seconds; of an operation that one rank never issues


def set_prefix(prefix: str) -> None:
    os.environ[PREFIX] = prefix


def clear_prefix() -> None:
    os.environ.pop(PREFIX, None)


class Dumping:
    """Worlds whose failed generations are written to a folder."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder
        self.told: list[Worker] = []

    def world(self, size: int, **options: object) -> World:
        self.told = self.pool.borrow(size)
        World(self.pool, self.told).run(set_prefix, str(self.folder / "rank_"))
        if options:
            return self.pool.generation(self.told, **options)
        return self.pool.fresh(size)

    def files(self, count: int, ending: str = ".json") -> list[Path]:
        """So many files with that ending, once they are there."""

        def found() -> list[Path]:
            every = [path for path in self.folder.iterdir() if path.suffix != ".tmp"]
            return sorted(path for path in every if path.name.endswith(ending))

        wait_until(lambda: len(found()) >= count, f"{count} files that end in '{ending}'")
        return found()

    def sentence(self, count: int) -> str:
        """What the analysis of one generation says, of which so many ranks have written."""
        self.files(count)
        done = analysis(str(self.folder))
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        return line


@pytest.fixture
def dumping(ranks: Pool, tmp_path: Path) -> Iterator[Dumping]:
    dumping = Dumping(ranks, tmp_path)
    yield dumping
    World(ranks, dumping.told).run_at_the_end(clear_prefix)


def sums(count: int) -> None:
    """All of these succeed."""
    for _ in range(count):
        dist.all_reduce(torch.ones(2, 3))


def sums_that_fail(count: int, limit: float = PATIENCE) -> None:
    """The last one fails; or one before it, where others are ahead and have failed already."""
    with pytest.raises(torchft_ext.CommError):
        sums(count - 1)
        torchft_ext.backend().set_timeout(timedelta(seconds=limit))
        sums(1)


def broadcast_that_fails(count: int) -> None:
    sums(count)
    with pytest.raises(torchft_ext.CommError):
        dist.broadcast(torch.ones(5), 0)


def aborts() -> None:
    abort("a test said so")


def message() -> None:
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def unpickled(path: Path) -> dict:
    with path.open("rb") as file:
        return pickle.load(file)


def generation_of(document: dict) -> dict:
    (generation,) = document["torchft_ext"]["generations"]
    return generation


def test_each_failed_generation_is_written_once_by_each_rank(dumping: Dumping) -> None:
    world = dumping.world(2)
    world.run(sums, 3)
    world.on(0, aborts)
    dumping.files(2)
    address = world.pool.address()
    values_of([world.start(rank, configure_next, address, 1 - rank, 2) for rank in (0, 1)])
    world.on(1, aborts)
    names = [path.name for path in dumping.files(4)]
    found = [re.fullmatch(r"rank_(\d)\.generation(\d)_(\w+)\.(\d)\.json", name) for name in names]
    of_ranks = sorted((one[2], one[1], one[4]) for one in found if one)
    assert of_ranks == [("1", "0", "0"), ("1", "1", "1"), ("2", "0", "1"), ("2", "1", "0")], names
    ids = {(one[2], one[3]) for one in found if one}
    assert len(ids) == len({name for _, name in ids}) == 2, (
        "an id is one generation's, on all ranks"
    )


def test_a_record_has_names_sizes_times_and_states(dumping: Dumping) -> None:
    world = dumping.world(2)
    world.run(sums, 2)
    world.on(0, aborts)
    for rank, path in enumerate(dumping.files(2)):
        document = read(path)
        generation = generation_of(document)
        assert generation["rank"] == generation["first_rank"] == rank
        assert (generation["generation"], generation["size"]) == (1, 2)
        assert generation["failure"]["kind"] == "aborted"
        assert "a test said so" in generation["failure"]["message"]
        assert len(generation["members"]) == 2
        assert [entry["collective_seq_id"] for entry in document["entries"]] == [1, 2]
        for entry in document["entries"]:
            assert entry["operation"] == "allreduce" and entry["state"] == "completed"
            assert entry["input_sizes"] == entry["output_sizes"] == [[2, 3]]
            assert entry["input_dtypes"] == ["float32"]
            created = entry["time_created_ns"]
            started = entry["time_discovered_started_ns"]
            assert created <= started <= entry["time_discovered_completed_ns"]


def torchs_analysis(folder: Path, *options: str) -> str:
    """Of the only generation; torch 2.15 has a file of its own there."""
    (its_id,) = {one.name.split("_")[-2] for one in folder.glob("*.generation1_*_*")}
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    command += ["-p", f"{its_id}_", *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_torchs_analyser_names_a_rank_that_issued_one_fewer(dumping: Dumping) -> None:
    world = dumping.world(4)
    calls = [world.start(rank, sums_that_fail, 3, SHORT_LIMIT) for rank in (0, 1, 3)]
    world.on(2, sums, 2)
    values_of(calls)
    dumping.files(4)
    text = torchs_analysis(dumping.folder)
    assert "Not all ranks joining collective, sequence number: 3" in text
    assert "missing ranks: {2}" in text
    assert "collective: gloo:all_reduce" in text
    assert "input sizes: [[2, 3]]" in text


def test_torchs_analyser_takes_a_world_in_which_a_rank_died(dumping: Dumping) -> None:
    world = dumping.world(4)
    world.run(every_collective)
    calls = [world.start_blocked(rank, sums_that_fail, 1) for rank in (0, 1, 3)]
    world.kill(2)
    values_of(calls)
    (path, *_) = dumping.files(3)
    id_of = generation_of(read(path))["id"]
    text = torchs_analysis(dumping.folder, "-p", f"{id_of}_", "--allow-incomplete-ranks")
    assert "we missed FR dumps from ranks ({2})" in text
    assert "Error type" not in text, text


def every_collective() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.ones(4) for _ in range(size)]
    dist.broadcast(torch.ones(4), 0)
    dist.all_gather(parts, torch.ones(4))
    dist.all_gather_into_tensor(torch.ones(4 * size), torch.ones(4))
    dist.reduce(torch.ones(4), 0)
    dist.reduce_scatter(torch.ones(4), parts)
    dist.gather(torch.ones(4), parts if rank == 0 else None, 0)
    dist.scatter(torch.ones(4), parts if rank == 0 else None, 0)
    dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size))
    dist.barrier()


def test_all_collectives_match_for_torchs_analyser(dumping: Dumping) -> None:
    world = dumping.world(2)
    world.run(every_collective)
    world.on(0, aborts)
    dumping.files(2)
    assert "rror" not in torchs_analysis(dumping.folder)


def test_only_json_has_messages(dumping: Dumping) -> None:
    world = dumping.world(2)
    world.run(message)
    world.on(0, aborts)
    (first, second) = dumping.files(2)
    assert [entry["operation"] for entry in read(first)["entries"]] == ["send"]
    assert [entry["operation"] for entry in read(second)["entries"]] == ["recv"]
    for path in (first, second):
        (entry,) = read(path)["entries"]
        assert entry["is_p2p"] and entry["state"] == "completed"
        assert entry["time_discovered_started_ns"] is not None
    for path in dumping.files(1, "_0") + dumping.files(1, "_1"):
        assert unpickled(path)["entries"] == []


def test_the_analysis_names_a_rank_that_died(dumping: Dumping) -> None:
    world = dumping.world(3)
    world.run(sums, 2)
    pid = world.workers[2].pid
    calls = [world.start_blocked(rank, sums_that_fail, 1) for rank in (0, 1)]
    world.kill(2)
    values_of(calls)
    line = dumping.sentence(2)
    assert f"rank 2 (host {os.uname().nodename}, pid {pid}) was lost: its process ended" in line
    assert line.endswith("while ranks 0 and 1 waited in allreduce (collective 3)."), line


def test_the_analysis_names_a_rank_that_issued_one_fewer(dumping: Dumping) -> None:
    world = dumping.world(3)
    calls = [world.start(rank, sums_that_fail, 3, SHORT_LIMIT) for rank in (0, 2)]
    world.on(1, sums, 2)
    values_of(calls)
    line = dumping.sentence(3)
    pid = world.workers[1].pid
    assert f"rank 1 (host {os.uname().nodename}, pid {pid}) had issued no collective after" in line
    assert "after allreduce (collective 2), " in line
    assert line.endswith("while ranks 0 and 2 waited in allreduce (collective 3)."), line


def test_the_analysis_names_a_rank_that_issued_another_operation(dumping: Dumping) -> None:
    world = dumping.world(3)
    world.run(sums, 1)
    # Both have issued before the failure comes.
    calls = [world.start_blocked(rank, sums_that_fail, 1) for rank in (0, 2)]
    calls.append(world.start(1, broadcast_that_fails, 0))
    values_of(calls)
    line = dumping.sentence(3)
    assert f"pid {world.workers[1].pid}) issued broadcast (collective 2) of 5 " in line
    assert line.endswith("ranks 0 and 2 issued allreduce (collective 2) of 6 float32."), line


def test_the_analysis_names_both_of_two_ranks_that_differ(dumping: Dumping) -> None:
    """The third has not come to it, so neither is the odd one."""
    world = dumping.world(3)
    world.run(sums, 1)
    call = world.start_blocked(0, sums_that_fail, 1)
    world.on(1, broadcast_that_fails, 0)
    call.value()
    world.on(2, wait_errored)
    line = dumping.sentence(3)
    first, second, _ = (worker.pid for worker in world.workers)
    assert "): ranks differ: rank 0 (" in line, line
    assert f"pid {first}) issued allreduce (collective 2) of 6 float32; rank 1 (" in line, line
    assert f"pid {second}) issued broadcast (collective 2) of 5 float32 from root 0; " in line, line
    assert line.endswith("of rank 2 there is no collective 2."), line


def test_the_analysis_names_a_rank_that_was_stopped(dumping: Dumping) -> None:
    world = dumping.world(3, heartbeat=seconds(1))
    world.run(sums, 2)
    calls = [world.start_blocked(rank, sums_that_fail, 1) for rank in (0, 2)]
    pid = world.workers[1].pid
    world.freeze(1)
    try:
        values_of(calls)
        line = dumping.sentence(2)
    finally:
        world.thaw(1)
    assert f"rank 1 (host {os.uname().nodename}, pid {pid}) was lost: its process has not" in line
    assert "(state T: stopped by a signal)" in line
    assert line.endswith("while ranks 0 and 2 waited in allreduce (collective 3)."), line


pending: list[dist.Work] = []


def waits_for(path: str) -> list[int]:
    """Issue an operation, and return whom it waits for, once its rank knows."""
    pending.append(dist.all_reduce(torch.ones(1), async_op=True))

    def found() -> list[list[int]]:
        torchft_ext.dump(path)
        waits = [entry["waited_for"] for entry in read(Path(path))["entries"]]
        return [ranks for ranks in waits if ranks]

    wait_until(lambda: bool(found()), "the answers of the others")
    return found()[-1]


def comes_to_it() -> None:
    (pending.pop() if pending else dist.all_reduce(torch.ones(1), async_op=True)).wait()


def test_a_record_says_who_was_waited_for(ranks: Pool, tmp_path: Path) -> None:
    world = ranks.fresh(3)
    calls = [world.start(rank, waits_for, str(tmp_path / f"{rank}.json")) for rank in (0, 2)]
    assert values_of(calls) == [[1], [1]]
    world.run(comes_to_it)


def test_a_folder_that_cannot_be_written_is_one_warning(rank_env: dict[str, str]) -> None:
    program = """
import torch, torch.distributed as dist, torchft_ext
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("ft", store=store, rank=0, world_size=1)
torchft_ext.backend().abort("first")
torchft_ext.backend().configure(f"127.0.0.1:{store.port}/second", 0, 1)
dist.all_reduce(torch.ones(1))
torchft_ext.backend().abort("second")
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**rank_env, PREFIX: "/nowhere/at/all/rank_"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "/nowhere/at/all" in line]
    lines = [line for line in lines if "torchft_ext: " in line]  # torch 2.15 has one of its own
    assert len(lines) == 1, done.stderr
    assert "No such file or directory" in lines[0] and PREFIX in lines[0]


def test_a_generation_that_ends_the_program_is_written(
    rank_env: dict[str, str], tmp_path: Path
) -> None:
    program = """
import torch.distributed as dist, torchft_ext
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("ft", store=store, rank=0, world_size=1)
torchft_ext.backend().abort("the last thing that it does")
raise SystemExit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**rank_env, PREFIX: f"{tmp_path}/rank_"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 3, done.stderr
    endings = sorted(path.suffix for path in tmp_path.glob("*.generation1_*"))
    assert len(endings) == 2 and endings[1] == ".json"


@pytest.mark.parametrize(("capacity", "kept"), [("3", [3, 4, 5]), ("0", [])])
def test_buffer_size_bounds_what_is_kept(
    capacity: str, kept: list[int], rank_env: dict[str, str], tmp_path: Path
) -> None:
    program = f"""
import torch, torch.distributed as dist, torchft_ext
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("ft", store=store, rank=0, world_size=1)
for _ in range(5): dist.all_reduce(torch.ones(1))
torchft_ext.dump({str(tmp_path / "now.json")!r})
dist.destroy_process_group()
"""
    subprocess.run(
        [sys.executable, "-c", program],
        env={**rank_env, "TORCH_FR_BUFFER_SIZE": capacity},
        check=True,
        timeout=PATIENCE,
    )
    entries = read(tmp_path / "now.json")["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == kept


def dumps_now(folder: str) -> None:
    sums(2)
    torchft_ext.dump(Path(folder) / f"now{dist.get_rank()}.json")
    torchft_ext.dump(f"{folder}/now_{dist.get_rank()}")


def test_dump_writes_what_groups_have_recorded(ranks: Pool, tmp_path: Path) -> None:
    ranks.fresh(2).run(dumps_now, str(tmp_path))
    for rank in range(2):
        mine = [
            one
            for one in read(tmp_path / f"now{rank}.json")["torchft_ext"]["generations"]
            if one["size"] == 2 and one["failure"] is None
        ]
        assert mine[-1]["rank"] == rank
        config = unpickled(tmp_path / f"now_{rank}")["pg_config"]
        assert mine[-1]["name"] in config


def test_dump_to_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "now.json"
    error = failure_of(lambda: torchft_ext.dump(path))
    assert error is not None and error.type == "FileNotFoundError"
    assert str(path) in error.text


def analysis(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchft_ext.analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_the_program_says_what_it_reads_and_what_is_missing(tmp_path: Path) -> None:
    assert "--json" in analysis("--help").stdout
    nothing = analysis(str(tmp_path))
    assert nothing.returncode == 2 and PREFIX in nothing.stderr
    assert analysis(str(tmp_path / "missing")).returncode == 2
    (tmp_path / "other.json").write_text('{"entries": []}')
    (tmp_path / "bad.json").write_text('{"torchft_ext": {"format": 1, "generations": [{}]}}')
    bad = analysis(str(tmp_path))
    assert bad.returncode == 2 and "bad.json: a damaged record" in bad.stderr


torchs_own = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"), reason="torch 2.15 has it"
)


def torchs_states() -> list[str]:
    """Of the operations of this process's default group, as torch's own recorder has them."""
    text = torch._C._distributed_c10d._dump_fr_trace_json(True, False, backend="ft")
    return [entry["state"] for entry in json.loads(text)["entries"]]


def torchs_states_of_sums() -> list[str]:
    torch._C._distributed_c10d._reset_fr_trace(backend="ft")
    works = [dist.all_reduce(torch.ones(2, 3), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    sums(2)
    wait_until(lambda: torchs_states() == ["completed"] * 5, "that torch knows")
    return torchs_states()


def fails_before_torchs_eyes() -> list[str]:
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2, 3), async_op=True)  # nobody joins in
        abort("for torch")
        assert failure_of(work.wait) is not None
    else:
        wait_until(lambda: backend().errored() is not None, "the abort")
    return torchs_states()


@torchs_own
def test_torchs_own_recorder_hears_of_successes_and_of_failures(dumping: Dumping) -> None:
    for used in dumping.pool.borrow(MOST):  # torch writes one file in a process's life
        used.kill()
    world = dumping.world(2)
    assert world.run(torchs_states_of_sums) == [["completed"] * 5] * 2
    states = values_of([world.start(rank, fails_before_torchs_eyes) for rank in (0, 1)])
    assert states[0][:5] == ["completed"] * 5 and states[0][5] != "completed", states
    dumping.files(2, ".json")
    wait_until(lambda: (dumping.folder / "rank_0").exists(), "torch's own file")


def test_json_is_for_programs(dumping: Dumping) -> None:
    world = dumping.world(2)
    world.run(sums, 1)
    world.on(1, aborts)
    dumping.files(2)
    (report,) = json.loads(analysis(str(dumping.folder), "--json").stdout)
    assert (report["kind"], report["ranks"], report["records"]) == ("ended", [1], [0, 1])
    assert report["collective"] is None and "a test said so" in report["sentence"]
