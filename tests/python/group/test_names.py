"""Every name of the backend resolves, by every way torch has to name one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fresh_process import run_cases
from ports import free_ports
from ranks import values_of
from rankside import backend, connected_store, kept, leave_default_group, seconds
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from values import check_sum

NAMES = [
    *("ft", "FT", "ft:host", "FT:HOST", "ft_host", "FT_HOST", "cpu:ft", "cpu:ft_host"),
    "cpu:gloo,cuda:ft",
]
LATER_ENGINES = ["ft:nccl", "ft_nccl"]


def init_alone(name: str, **options: object) -> None:
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, **options)


def loaded() -> bool:
    return "torchft_ext._C" in sys.modules


def name_without_import(name: str) -> str:
    assert not loaded(), "import torch alone must not load the native module"
    init_alone(name)
    check_sum()
    kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    dist.destroy_process_group()
    return kind


def name_with_import(name: str) -> str:
    import torchft_ext

    init_alone(name)
    check_sum()
    assert torchft_ext.backend().size() == 1
    dist.destroy_process_group()
    return name


def test_each_registered_engine_has_its_names_before_the_library_is_loaded() -> None:
    import torchft_ext_names
    from torchft_ext import _C

    assert list(torchft_ext_names.ENGINES) == _C._engine_names()
    for engine in _C._engine_names():
        assert {f"ft:{engine}", f"ft_{engine}"} <= set(torchft_ext_names.NAMES)
        assert set(torchft_ext_names.ENGINES[engine]) <= set(torchft_ext_names.NAMES["ft"])


def test_names_resolve_without_an_import(rank_env):
    kinds = run_cases("test_names", "name_without_import", NAMES, rank_env)
    assert kinds.pop("cpu:gloo,cuda:ft") == "ProcessGroupGloo"
    assert "ProcessGroupGloo" not in kinds.values()


def test_names_resolve_with_an_import_and_without_autoload(rank_env):
    env = {**rank_env, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run_cases("test_names", "name_with_import", NAMES[:-1], env)


def import_with_torch(version: str) -> str:
    torch.__version__ = version
    with pytest.raises(ImportError) as caught:
        import torchft_ext  # noqa: F401
    assert not loaded()
    return str(caught.value)


def test_torch_of_another_minor_is_refused_at_import_with_what_to_do(rank_env):
    versions = ["2.99.1", "3.13.0"]
    for version, text in run_cases("test_names", "import_with_torch", versions, rank_env).items():
        assert version in text and "pip install" in text and "--no-build-isolation" in text


def later_engine(name: str) -> str:
    try:
        init_alone(name)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("an engine that does not exist was accepted")


def test_engines_that_do_not_exist_yet_say_what_to_use_instead(rank_env):
    for name, text in run_cases("test_names", "later_engine", LATER_ENGINES, rank_env).items():
        assert name[3:] in text.lower() and "use '" in text, text


def disabled_with_options(case: str) -> float:
    import torchft_ext

    init_alone(case, pg_options=torchft_ext.Options(timeout=seconds(7)))
    plain = dist.group.WORLD._get_backend(torch.device("cpu"))
    return plain.options._timeout.total_seconds()


def test_disabled_names_keep_the_timeout_of_the_options(rank_env):
    env = {**rank_env, "TORCHFT_EXT_DISABLE": "1"}
    assert run_cases("test_names", "disabled_with_options", ["ft"], env) == {"ft": 7.0}


def disabled(name: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_alone(name)
        part = dist.new_group(backend=name)
    check_sum()
    tensor = torch.full((3,), 2.0)
    dist.all_reduce(tensor, group=part)
    assert tensor.tolist() == [2, 2, 2]
    kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    assert kind == "ProcessGroupGloo", kind
    import torchft_ext

    with pytest.raises(ValueError, match="expected a group made with the backend 'ft'"):
        torchft_ext.backend()
    return [str(w.message) for w in caught if "TORCHFT_EXT_DISABLE" in str(w.message)]


def test_disabled_names_resolve_to_gloo_with_one_warning(rank_env):
    env = {**rank_env, "TORCHFT_EXT_DISABLE": "1"}
    for said in run_cases("test_names", "disabled", NAMES, env).values():
        assert len(said) == 1, said


LEFT_AS_IT_WAS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as collectives
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP

def found():
    places = [dist, c10d, functional, collectives, DDP, dist.ProcessGroup, torch._C.Future]
    places += [each for each in vars(collectives).values() if isinstance(each, type)]
    return {(str(place), name): value for place in places for name, value in vars(place).items()}

before, finders = found(), list(sys.meta_path)
import torchft_ext
after = found()
print([each for each in after if after[each] is not before.get(each)], sys.meta_path == finders)
"""


def test_disabled_library_leaves_the_functions_of_torch_alone(rank_env):
    env = {**rank_env, "TORCHFT_EXT_DISABLE": "1"}
    command = [sys.executable, "-c", LEFT_AS_IT_WAS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "True"]


def disabled_without_nccl(name: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        init_alone(name)
    assert not dist.is_initialized()
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a CUDA device")
def test_disabled_name_for_cuda_alone_is_refused_where_there_is_none(rank_env):
    env = {**rank_env, "TORCHFT_EXT_DISABLE": "1"}
    names = ["ft:nccl", "ft_nccl"]
    for name, text in run_cases("test_names", "disabled_without_nccl", names, env).items():
        assert f"'{name}' would be plain nccl" in text and "use 'ft' or 'gloo'" in text, text


TWO_OF_OURS = ["cpu:ft_host,cuda:ft_nccl", "cuda:ft,cpu:ft_host", "cpu:FT,cuda:FT_NCCL"]


def two_of_ours(spec: str) -> list[str]:
    """What init_process_group() and new_group() say of such a spec."""
    texts = []
    for make in (init_alone, lambda spec: dist.new_group(backend=spec)):
        with pytest.raises(ValueError) as caught:
            make(spec)
        texts.append(str(caught.value))
        if not dist.is_initialized():
            init_alone("ft")
    check_sum()
    return texts


def test_spec_with_two_of_our_backends_is_refused_by_their_names(rank_env):
    for spec, texts in run_cases("test_names", "two_of_ours", TWO_OF_OURS, rank_env).items():
        names = sorted(part.split(":", 1)[1].lower() for part in spec.split(","))
        for function, text in zip(("init_process_group", "new_group"), texts, strict=True):
            assert text.startswith(f"{function}: expected one backend of torchft_ext"), text
            assert f"found {names}: " in text and "write 'ft'" in text, text


def special(case: str) -> None:
    import torchft_ext

    if case == "mixed":
        init_alone("cpu:ft_host,cuda:gloo")
        check_sum()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            torchft_ext.backend().configure("127.0.0.1:1/x", 0, 2, timeout=seconds(1))
        assert "size" in str(caught.value), caught.value
        check_sum()
    elif case == "debug":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        init_alone("ft")
        check_sum()
        assert torchft_ext.backend().size() == 1


@pytest.mark.skipif(
    hasattr(c10d, "_reconfigure"), reason="since torch 2.14 mixed groups follow another size"
)
def test_mixed_spec_works_and_refuses_another_size(rank_env):
    run_cases("test_names", "special", ["mixed"], rank_env)


def test_debug_level_detail_is_served(rank_env):
    run_cases("test_names", "special", ["debug"], rank_env)


def init_by(method: str, where: str, rank: int, size: int) -> tuple[int, int]:
    leave_default_group()
    limit = seconds(60)
    if method == "env":
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": where}
        os.environ.update(place | {"RANK": str(rank), "WORLD_SIZE": str(size)})
        dist.init_process_group("ft", timeout=limit)
    elif method == "store":
        store = dist.FileStore(where, size)
        dist.init_process_group("ft", store=store, rank=rank, world_size=size, timeout=limit)
    else:
        url = f"{method}://{where}"
        dist.init_process_group("ft", init_method=url, rank=rank, world_size=size, timeout=limit)
    check_sum()
    dist.barrier()
    found = dist.get_rank(), dist.get_world_size()
    leave_default_group()
    return found


@pytest.mark.parametrize("method", ["env", "tcp", "file", "store"])
def test_init_process_group_by_every_method(ranks, tmp_path, method):
    port = free_ports(1)[0]
    places = {"env": str(port), "tcp": f"127.0.0.1:{port}"}
    where = places.get(method, str(tmp_path / "rendezvous"))
    world = ranks.world(2)
    calls = [world.start(rank, init_by, method, where, rank, 2) for rank in range(2)]
    assert values_of(calls) == [(0, 2), (1, 2)]


def limit_of_operations(where: str) -> float:
    import torchft_ext

    store, options = kept["store"], None
    rank, size = dist.get_rank(), dist.get_world_size()
    leave_default_group()
    if where == "pg_options":
        options = torchft_ext.Options(timeout=seconds(3.0))
    limit = seconds(3.0) if where == "timeout" else None
    dist.init_process_group(
        "ft", store=store, rank=rank, world_size=size, timeout=limit, pg_options=options
    )
    with pytest.raises(torchft_ext.CommTimeoutError) as caught:
        dist.recv(torch.ones(1), 1 - rank)
    return caught.value.limit.total_seconds()


def connect_store(address: str) -> None:
    kept["store"] = connected_store(address)


@pytest.mark.parametrize("where", ["timeout", "pg_options"])
def test_timeout_is_taken_from_init_and_from_options(ranks, where):
    world = ranks.world(2)
    world.run(connect_store, ranks.address())
    assert world.run(limit_of_operations, where) == [3.0, 3.0]


def limit_in_subgroup(where: str) -> float:
    import torchft_ext

    limit, peer = seconds(3.0), 1 - dist.get_rank()
    options = torchft_ext.Options(timeout=limit)
    if where == "timeout":
        group = dist.new_group(backend="ft", timeout=limit)
    elif where == "pg_options":
        group = dist.new_group(backend="ft", pg_options=options)
    else:
        mesh = init_device_mesh(
            "cpu", (2,), mesh_dim_names=("all",), backend_override={"all": ("ft:host", options)}
        )
        group = mesh.get_group()
    with pytest.raises(torchft_ext.CommTimeoutError) as caught:
        dist.recv(torch.ones(1), group=group, group_src=peer)
    return caught.value.limit.total_seconds()


@pytest.mark.parametrize("where", ["timeout", "pg_options", "backend_override"])
def test_subgroup_takes_the_timeout_that_it_is_made_with(ranks, where):
    assert ranks.fresh(2).run(limit_in_subgroup, where) == [3.0, 3.0]


def subgroups(name: str) -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    evens = dist.new_group(list(range(0, size, 2)), backend=name)
    odds = dist.new_group(list(range(1, size, 2)), backend=name)
    mine = odds if rank % 2 else evens
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == sum(range(rank % 2, size, 2))
    assert dist.get_rank(mine) == rank // 2
    return dist.get_world_size(mine)


@pytest.mark.parametrize("name", ["ft", "ft:host", "ft_host", None])
def test_new_group_makes_independent_groups(ranks, name):
    assert ranks.fresh(3).run(subgroups, name) == [2, 1, 2]


def abort_subgroup() -> None:
    import torchft_ext

    group = dist.new_group(backend="ft")
    dist.barrier()  # until then a rank may still be about to return from new_group()
    if dist.get_rank() == 0:
        torchft_ext.backend(group).abort("only this group")
    with pytest.raises(torchft_ext.CommAbortedError):
        dist.all_reduce(torch.ones(1), group=group)
    assert torchft_ext.backend().errored() is None
    check_sum()


def test_abort_of_one_group_leaves_the_others_alone(ranks):
    ranks.fresh(2).run(abort_subgroup)


def mesh_with_override() -> None:
    mesh = dist.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replica", "shard"), backend_override={"shard": "ft:host"}
    )
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    first = dist.get_rank() // 2 * 2
    assert tensor.item() == 2 * first + 1
    dist.all_reduce(tensor, group=mesh.get_group("replica"))
    assert tensor.item() == 6


def test_device_mesh_takes_the_name_as_an_override(ranks):
    ranks.fresh(4).run(mesh_with_override)


TORCHRUN_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("ft")
tensor = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
assert tensor.tolist() == [3.0] * 3, tensor
dist.destroy_process_group()
"""


def test_torchrun_runs_a_script_that_names_ft(rank_env, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)], env=rank_env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def names_of_the_group() -> tuple[str, str, str]:
    return dist.get_backend(), backend().name(), dist.group.WORLD.name()


def test_group_and_backend_carry_their_name(ranks):
    (of_torch, of_backend, of_group) = ranks.fresh(1, backend_name="ft:host").on(
        0, names_of_the_group
    )
    assert of_torch == "ft:host" and of_backend.startswith("ft") and of_group != "undefined"


def test_errors_keep_their_fields_when_they_are_pickled():
    import torchft_ext

    cause = torchft_ext.Cause(rank=2, host="a", pid=7, how="its process ended")
    error = torchft_ext.PeerLostError(
        "gone", generation=3, rank=1, size=4, cause=cause, op="allreduce"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is torchft_ext.PeerLostError and str(copy) == "gone"
    assert (copy.generation, copy.rank, copy.size, copy.op) == (3, 1, 4, "allreduce")
    assert copy.cause == cause and copy.seq is None and copy.limit is None


def test_stub_names_what_the_module_has():
    import ast

    from torchft_ext import _C

    stub = ast.parse((Path(_C.__file__).parent / "_C.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    if not hasattr(dist, "_reconfigure"):  # before torch 2.14
        del classes["_ReconfigurableGroup"]
    assert classes.keys() | functions == {name for name in vars(_C) if not name.startswith("__")}
    for name, node in classes.items():
        members = {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
        members |= {m.target.id for m in node.body if isinstance(m, ast.AnnAssign)}
        native = {m for m in vars(getattr(_C, name)) if not m.startswith("_")}
        if name == "Backend":
            native.discard("reconfigure")  # torch's own, overridden where torch has it
        assert {m for m in members if not m.startswith("_")} == native, name


def test_public_names_exist_and_the_package_is_typed():
    import torchft_ext

    assert (Path(torchft_ext.__file__).parent / "py.typed").exists()
    for name in torchft_ext.__all__:
        assert getattr(torchft_ext, name) is not None
    assert {"backend", "Backend", "Options", "CommError", "Cause"} <= set(torchft_ext.__all__)
