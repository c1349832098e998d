"""torchft_ext.elastic.State: leaves and their fingerprints, the codec, what a failure restores."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum, StrEnum

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from torchft_ext.elastic._codec import decode, encode
from torchft_ext.elastic._fingerprint import fingerprints, flat_bytes
from torchft_ext.elastic._loading import Leaves, load
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._state import State

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]
CHUNK = 1 << 18  # bytes


class Color(IntEnum):
    RED = 1


class Name(StrEnum):
    RED = "red"


class Plain(Enum):
    RED = 1


Point = namedtuple("Point", "x y")
EQUAL = [  # what is given, and what comes back
    (Color.RED, 1),
    (Name.RED, "red"),
    ({Name.RED: 1}, {"red": 1}),
    (Point(1, Color.RED), (1, 1)),
    (torch.Size([2, 3]), (2, 3)),
    (type("Many", (list,), {})([1, 2]), [1, 2]),
    (type("Bits", (bytes,), {})(b"ab"), b"ab"),
]
ALIKE = {"float64": 0.1, "int64": 3, "uint8": 255, "bool_": True, "str_": "ab", "bytes_": b"ab"}


def hash_of(tensor: torch.Tensor) -> bytes:
    (found,) = fingerprints([tensor])
    return found


def some(dtype: torch.dtype, count: int = 13) -> torch.Tensor:
    size = count * dtype.itemsize
    data = torch.arange(1, size + 1).remainder(2 if dtype is torch.bool else 251)
    return data.to(torch.uint8).view(dtype)


def small_state(**named: object) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    return State(model, optimizer, scheduler, BatchSampler(20, 3), **named)


def train(state: State, count: int = 1) -> None:
    objects = state.objects
    for _ in range(count):
        objects["model"](torch.randn(8, 3)).square().sum().backward()
        objects["optimizer"].step()
        state.clear_gradients()


# fingerprints


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 13])
def test_fingerprint_depends_on_the_bytes_only(dtype, count):
    tensor = some(dtype, count)
    assert len(hash_of(tensor)) == 16
    assert hash_of(tensor) == hash_of(tensor.clone()) == hash_of(flat_bytes(tensor))


@pytest.mark.parametrize("size", [1, 3, 4, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_every_byte_counts(size):
    data = torch.zeros(size, dtype=torch.uint8)
    places = {0, size // 2, size - 1}
    hashes = {hash_of(data)}
    for place in places:
        changed = data.clone()
        changed[place] = 128
        hashes.add(hash_of(changed))
    assert len(hashes) == 1 + len(places)
    assert hash_of(torch.zeros(size + 1, dtype=torch.uint8)) not in hashes


def test_order_counts():
    tensor = torch.arange(3 * CHUNK // 4, dtype=torch.float32)  # three chunks
    half = len(tensor) // 2
    swapped = torch.cat([tensor[half:], tensor[:half]])
    exchanged = tensor.view(3, -1)[[1, 0, 2]].reshape(-1)  # whole chunks
    assert (
        len({hash_of(tensor), hash_of(swapped), hash_of(exchanged), hash_of(tensor.flip(0))}) == 4
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_flipped_signs_do_not_cancel(dtype):
    tensor = torch.ones(64, dtype=dtype)
    hashes = {hash_of(tensor)}
    for first in range(8):
        for second in range(first + 1, 8):
            flipped = tensor.clone()
            flipped[[first, second]] *= -1
            hashes.add(hash_of(flipped))
    assert len(hashes) == 1 + 28


def test_layout_in_memory_does_not_count():
    tensor = torch.randn(4, 6, dtype=torch.complex64)
    assert hash_of(tensor) == hash_of(tensor.t().contiguous().t())
    assert hash_of(tensor.conj()) == hash_of(tensor.conj().resolve_conj())
    odd = torch.arange(9, dtype=torch.uint8)[1:]  # not at an address of 4-byte numbers
    assert hash_of(odd) == hash_of(odd.clone())


# codec


def there_and_back(tree: object, **options: bool) -> object:
    encoded = encode(tree, "it", **options)
    return decode(encoded.data, "it", lambda path, _: encoded.tensors[path], **options)


def test_plain_values_come_back_with_their_types():
    tree = {
        "none": None,
        "bools": [True, False],
        "numbers": (1, -(1 << 90), 0.1, -0.0, math.inf),
        3: {"text": "ü\ud800", "bytes": b"\0\xff", (1, "a"): []},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({3: 1, 5: 2}),
        "empty": {},
    }
    back = there_and_back(tree)
    assert back == tree and repr(back["numbers"]) == repr(tree["numbers"])
    assert list(back["ordered"]) == ["b", "a"] and type(back["counter"]) is Counter


def test_encoding_does_not_depend_on_the_order_of_a_dict():
    assert encode({"a": 1, 2: 3}, "it").data == encode({2: 3, "a": 1}, "it").data
    assert encode({"a": True}, "it").data != encode({"a": 1}, "it").data


def test_tensors_are_leaves_with_paths():
    tree = {"state": {0: {"step": torch.ones(2)}}, "list": [torch.zeros(()), 1]}
    encoded = encode(tree, "optimizer")
    assert list(encoded.tensors) == ["optimizer/list[0]", "optimizer/state[0]/step"]
    assert list(encoded.values) == ["optimizer/list[1]"]
    assert there_and_back(tree)["state"][0]["step"] is tree["state"][0]["step"]


def test_a_path_may_be_spelled_by_the_caller():
    with pytest.raises(TypeError, match=r"^it\['a'\]\[1\]: "):
        encode({"a": [0, object()]}, "it", join=lambda path, key: f"{path}[{key!r}]")


LEAVES = [object(), Plain.RED, {1, 2}, deque([1]), torch.float32, lambda: 0, 1j]


@pytest.mark.parametrize("leaf", [*LEAVES, defaultdict(lambda: 0)])
def test_other_leaves_are_refused_by_path(leaf):
    with pytest.raises(TypeError, match=r"^it/a\[1\]: a state has None, bool"):
        encode({"a": [0, leaf]}, "it")


@pytest.mark.parametrize(("given", "plain"), EQUAL, ids=lambda value: type(value).__name__)
def test_subclasses_travel_as_the_plain_values_that_they_equal(given, plain):
    back = there_and_back({"a": given})
    assert repr(back) == repr({"a": plain})
    assert encode({"a": given}, "it").data == encode({"a": plain}, "it").data


@pytest.mark.parametrize("name", ALIKE)
def test_scalars_of_numpy_travel_as_the_plain_values_that_they_equal(name):
    scalar = getattr(pytest.importorskip("numpy"), name)(ALIKE[name])
    assert repr(there_and_back([scalar, {scalar: 0}])) == repr([ALIKE[name], {ALIKE[name]: 0}])
    same = encode([ALIKE[name], {ALIKE[name]: 0}], "it")
    assert encode([scalar, {scalar: 0}], "it") == same


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_narrow_floats_of_numpy_keep_their_type(name):
    numpy = pytest.importorskip("numpy")
    for value in (0.1, -0.0, math.inf):
        scalar = getattr(numpy, name)(value)
        back = there_and_back(scalar)
        assert type(back) is type(scalar) and back.tobytes() == scalar.tobytes()


@pytest.mark.parametrize("name", ["complex64", "longdouble", "datetime64", "timedelta64"])
def test_other_scalars_of_numpy_are_refused(name):
    numpy = pytest.importorskip("numpy")
    for value in (getattr(numpy, name)(1, *(["s"] if "time" in name else [])), numpy.ones(2)):
        with pytest.raises(TypeError, match=r"^it: .*found numpy"):
            encode(value, "it")


@pytest.mark.parametrize("factory", [None, dict, list, float])
def test_a_defaultdict_keeps_its_factory(factory):
    back = there_and_back({"a": defaultdict(factory, {1: 2})})["a"]
    assert type(back) is defaultdict and back == {1: 2} and back.default_factory is factory


def test_other_leaves_travel_by_pickle_where_it_is_allowed():
    back = there_and_back({"a": Color.RED, "b": {1, 2}}, allow_pickle=True)
    assert back == {"a": Color.RED, "b": {1, 2}} and type(back["a"]) is Color
    data = encode(Color.RED, "it", allow_pickle=True).data
    with pytest.raises(TypeError, match="allow_pickle is not set here"):
        decode(data, "it", lambda *_: None)


def test_tensors_without_plain_memory_are_refused_by_path():
    for tensor in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match=r"^it/x: expected a"):
            encode({"x": tensor}, "it")


def block(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


NARROW = [b"n" + block(name) + block(b"\0") for name in (b"float32", b"bytes")]
NO_STATE = [b"", b"?", b"l\1\0\0", b"i" + b"\xff" * 8, b"NN", b"e" + block(b"open"), *NARROW]


@pytest.mark.parametrize("data", NO_STATE)
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(ValueError, match="bytes"):
        decode(data, "it", lambda *_: None)


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(ValueError, match="'it/a/b'"):
        encode({"a/b": 1, "a": {"b": 2}}, "it")


# State


def test_objects_have_names():
    state = small_state(ema=[torch.zeros(1)])
    assert state.names == ("model", "optimizer", "scheduler", "batchsampler", "ema")
    two = State(nn.Linear(1, 1), nn.Linear(1, 1), teacher=nn.Linear(1, 1))
    assert two.names == ("model", "model2", "teacher")
    with pytest.raises(ValueError, match="two objects are called 'model'"):
        State(nn.Linear(1, 1), model=nn.Linear(1, 1))
    with pytest.raises(TypeError, match="State: what: expected an object with state_dict"):
        State(what=3)


def test_fingerprints_name_every_leaf():
    state = small_state()
    before = state.fingerprints()
    assert {"model/0.weight", "optimizer/param_groups[0]/lr", "scheduler/milestones[3]"} <= set(
        before
    )
    train(state)
    after = state.fingerprints()
    assert "optimizer/state[0]/exp_avg" in after and "optimizer/state[0]/exp_avg" not in before
    changed = {path for path in before if before[path] != after[path]}
    assert "model/0.weight" in changed and "scheduler/last_epoch" not in changed


def test_digest_tells_equal_states():
    assert small_state().digest() == small_state().digest()
    other = small_state()
    other.objects["optimizer"].param_groups[0]["lr"] *= 2
    assert other.digest() != small_state().digest()


def test_restore_gives_buffers_back_and_leaves_parameters():
    state = small_state()
    state.snapshot()
    before = state.fingerprints()
    model = state.objects["model"]
    model[1].running_var = model[1].running_var * 3  # another tensor object
    train(state)
    state.restore()
    after = state.fingerprints()
    assert after["model/1.running_var"] == before["model/1.running_var"]
    assert after["model/1.num_batches_tracked"] == before["model/1.num_batches_tracked"]
    assert after["model/0.weight"] != before["model/0.weight"]


def test_restore_gives_the_loss_scaler_back():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = State(model, optimizer, scaler)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    state.snapshot()
    scaler.unscale_(optimizer)
    scaler.update(7.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    state.restore()
    assert scaler.get_scale() == 65536
    scaler.unscale_(optimizer)  # which raises the second time for one update()


def test_gradients_are_cleared():
    state = small_state()
    model = state.objects["model"]
    model(torch.randn(8, 3)).sum().backward()
    state.clear_gradients()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_plain_tensors_are_written_in_place():
    one, two = torch.zeros(2), [torch.zeros(1), torch.zeros(3)]
    state = State(one=one, two=two, three={"a": torch.zeros(1)})
    assert state.names == ("one", "two", "three")
    state.load("one", {"tensor": torch.ones(2)})
    state.load("two", {"0": torch.ones(1), "1": torch.ones(3)})
    assert one.sum() == 2 and two[1].sum() == 3
    with pytest.raises(ValueError, match=r"expected tensors \['0', '1'\], found \['0'\]"):
        state.load("two", {"0": torch.ones(1)})


def test_samplers_follow_commit_and_rewind():
    state = small_state()
    sampler = state.objects["batchsampler"]
    state.follow(1, 4)
    assert (sampler.rank, sampler.size) == (1, 4)
    state.commit()
    assert (state.step, sampler.position) == (1, 12)
    resets = sampler.resets
    state.rewind()
    assert sampler.resets > resets


def test_checkpoint_comes_back_whole(tmp_path):
    state, fresh = small_state(), small_state()
    train(state, 3)
    state.commit()
    torch.save(state.state_dict(), tmp_path / "checkpoint")
    fresh.load_state_dict(torch.load(tmp_path / "checkpoint"))
    assert (fresh.step, fresh.digest()) == (1, state.digest())


LOADABLE = ["Adadelta", "Adagrad", "Adam", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


@pytest.mark.parametrize("name", [*LOADABLE, "Adafactor", "Adamax", "SGD"])
def test_distributed_checkpoint_comes_back_whole_into_a_fresh_optimizer(tmp_path, name):
    def make() -> State:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        options = {"momentum": 0.9} if name == "SGD" else {}
        return State(model, getattr(torch.optim, name)(model.parameters(), **options))

    state, fresh = make(), make()
    train(state, 3)
    state.commit()
    dcp.save(state.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    before = fresh.digest()
    saved = fresh.state_dict(to_load=True)
    assert fresh.digest() == before and fresh.objects["model"].weight.grad is None
    dcp.load(saved, checkpoint_id=tmp_path / "checkpoint")
    fresh.load_state_dict(saved)
    assert (fresh.step, fresh.digest()) == (1, state.digest())


def test_state_to_load_is_the_optimizers_own_where_it_has_one():
    state = small_state()
    train(state, 3)
    saved = state.state_dict(to_load=True)["objects"]["optimizer"]
    assert saved["state"][0]["step"] == 3


def test_moments_keep_their_dtype_and_their_bits():
    def bfloat16_with_float32_moments(seed: int) -> State:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            entry = {"step": torch.tensor(1.0), "exp_avg": torch.randn(parameter.shape)}
            entry["exp_avg_sq"] = torch.rand(parameter.shape, dtype=torch.float64)
            entry["rest"] = [1, {"x": (torch.randn(2), None)}]
            optimizer.state[parameter] = entry
        return State(optimizer)

    state, fresh = bfloat16_with_float32_moments(1), bfloat16_with_float32_moments(2)
    load_over(state, fresh)
    assert fresh.digest() == state.digest()


@pytest.mark.parametrize("name", ["Adam", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop", "SGD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_optimizers_of_every_dtype_have_states_that_a_newcomer_can_take(name, dtype):
    def make() -> State:
        model = nn.Linear(3, 2, dtype=dtype)
        return State(model, getattr(torch.optim, name)(model.parameters(), lr=0.01))

    state, fresh = make(), make()
    for _ in range(3):
        state.objects["model"](torch.randn(8, 3, dtype=dtype)).square().sum().backward()
        state.objects["optimizer"].step()
    load_over(state, fresh)
    assert fresh.digest() == state.digest()
    fresh.objects["model"](torch.randn(8, 3, dtype=dtype)).square().sum().backward()
    fresh.objects["optimizer"].step()


def test_scalar_of_an_optimizer_stays_on_the_host():
    """NAdam's is there, whatever device the parameter is on; here "meta" stands for that one."""

    class Moving(torch.optim.NAdam):
        def load_state_dict(self, tree):
            super().load_state_dict(tree)
            for entry in self.state.values():
                entry["mu_product"] = entry["mu_product"].to("meta")

    def make() -> State:
        return State(Moving(nn.Linear(3, 2).parameters()))

    state, fresh = make(), make()
    for parameter in state.objects["optimizer"].param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    state.objects["optimizer"].step()
    load_over(state, fresh)
    assert fresh.digest() == state.digest()


def load_over(state: State, fresh: State) -> None:
    """What a newcomer does with all of another member's state."""
    for name, encoded in state.encode().items():
        leaves = Leaves(
            {path: tensor.detach().clone() for path, tensor in encoded.tensors.items()}, {}
        )
        load(fresh, name, encoded.data, leaves)


def test_objects_can_be_replaced():
    state = small_state()
    state.replace(model=nn.Linear(1, 1))
    assert state.fingerprints().keys() >= {"model/weight", "model/bias"}
    with pytest.raises(KeyError, match="'other': expected one of"):
        state.replace(other=nn.Linear(1, 1))


SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1, total_steps=9),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1.0),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1, cycle_momentum=False),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 2)],
        [3],
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_torchs_schedulers_have_states_that_travel(make):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    state = State(scheduler=make(optimizer))
    encoded = state.encode_one("scheduler")
    state.load("scheduler", decode(encoded.data, "scheduler", lambda p, _: encoded.tensors[p]))
    assert state.encode_one("scheduler").data == encoded.data


OPTIMIZERS = ["Adadelta", "Adagrad", "Adam", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Adafactor", "Adamax", "LBFGS", "Rprop"])
def test_torchs_optimizers_have_states_that_travel(name):
    model = nn.Linear(2, 2)
    optimizer = getattr(torch.optim, name)(model.parameters())
    state = State(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    encoded = state.encode_one("optimizer")
    state.load("optimizer", decode(encoded.data, "optimizer", lambda p, _: encoded.tensors[p]))
    assert state.encode_one("optimizer").data == encoded.data


def test_a_change_of_members_imports_nothing_of_torchs_more():
    """Its debug module takes a third of a second, and needs numpy."""
    program = """
import sys
import torch
import torch.distributed.tensor
from torchft_ext import elastic
from torchft_ext.elastic._shards import forget_meshes
elastic.State(torch.nn.Linear(1, 1))
before = set(sys.modules)
forget_meshes()
assert {name for name in set(sys.modules) - before if name.startswith("torch.")} == set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
