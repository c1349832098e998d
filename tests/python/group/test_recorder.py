"""The record of operations: a file for each generation that fails, and one on demand."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Worker, World, values_of
from rankside import PATIENCE, abort, failure_of, wait_until

import torchft_ext
from torchft_ext import analyze

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

    def world(self, size: int) -> World:
        self.told = self.pool.borrow(size)
        World(self.pool, self.told).run(set_prefix, str(self.folder / "rank_"))
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
        done = subprocess.run(
            [sys.executable, "-m", "torchft_ext.analyze", str(self.folder)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
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
    """The last one fails."""
    sums(count - 1)
    torchft_ext.backend().set_timeout(timedelta(seconds=limit))
    with pytest.raises(torchft_ext.CommError):
        dist.all_reduce(torch.ones(2, 3))


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
    world.next().run(sums, 1)
    world.on(1, aborts)
    names = [path.name for path in dumping.files(4)]
    for generation in (1, 2):
        for rank in (0, 1):
            start = f"rank_{rank}.generation{generation}_"
            assert len([name for name in names if name.startswith(start)]) == 1, names
    ids = {name.split("_")[2].split(".")[0] for name in names}
    assert len(ids) == 2, "a generation has one id on all its ranks, and no other has it"


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


def test_torch_reads_the_pickles(dumping: Dumping, tmp_path: Path) -> None:
    world = dumping.world(2)
    world.run(sums, 2)
    world.on(0, aborts)
    for path in dumping.files(2, "_0") + dumping.files(2, "_1"):
        document = unpickled(path)
        assert set(document) >= {"version", "pg_config", "entries"}
        ((name, config),) = document["pg_config"].items()
        assert config == {"name": name, "desc": "0", "ranks": "[0, 1]"}
        assert [entry["profiling_name"] for entry in document["entries"]] == ["gloo:all_reduce"] * 2


def test_only_json_has_messages(dumping: Dumping) -> None:
    world = dumping.world(2)
    world.run(message)
    world.on(0, aborts)
    (first, second) = dumping.files(2)
    assert [entry["operation"] for entry in read(first)["entries"]] == ["send"]
    assert [entry["operation"] for entry in read(second)["entries"]] == ["recv"]
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
    assert line.endswith("while ranks 0 and 1 waited in allreduce 3."), line


def test_the_analysis_names_a_rank_that_issued_one_fewer(dumping: Dumping) -> None:
    world = dumping.world(3)
    calls = [world.start(rank, sums_that_fail, 3, SHORT_LIMIT) for rank in (0, 2)]
    world.on(1, sums, 2)
    values_of(calls)
    line = dumping.sentence(3)
    pid = world.workers[1].pid
    assert f"rank 1 (host {os.uname().nodename}, pid {pid}) had issued no collective after" in line
    assert "after allreduce 2, " in line
    assert line.endswith("while ranks 0 and 2 waited in allreduce 3."), line


def test_the_analysis_names_a_rank_that_issued_another_operation(dumping: Dumping) -> None:
    world = dumping.world(3)
    calls = [world.start(rank, sums_that_fail, 2) for rank in (0, 2)]
    calls.append(world.start(1, broadcast_that_fails, 1))
    values_of(calls)
    line = dumping.sentence(3)
    assert f"pid {world.workers[1].pid}) issued broadcast 2 of 5 float32 from root 0" in line
    assert line.endswith("where ranks 0 and 2 issued allreduce 2 of 6 float32."), line


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
    endings = sorted(path.suffix for path in tmp_path.iterdir())
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


def test_the_program_says_what_it_reads_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        analyze.main(["--help"])
    assert "--json" in capsys.readouterr().out
    assert analyze.main([str(tmp_path)]) == 2
    assert PREFIX in capsys.readouterr().err
    assert analyze.main([str(tmp_path / "missing")]) == 2
    (tmp_path / "bad.json").write_text('{"torchft_ext": {"format": 1, "generations": [{}]}}')
    assert analyze.main([str(tmp_path)]) == 2
    assert "bad.json: a damaged record" in capsys.readouterr().err
