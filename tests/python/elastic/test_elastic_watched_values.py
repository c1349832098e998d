"""WatchedValues: the bytes are always those of the values as they are now."""

from __future__ import annotations

from enum import Enum

import pytest
import torch

from torchft_ext.elastic._codec import encode
from torchft_ext.elastic._watched_values import WatchedValues


class Colour(Enum):
    RED = 1


def looked(watched: WatchedValues, values: dict[str, object]) -> dict[str, bytes]:
    watched.look(values)
    return dict(watched.encoded)


def encoded(values: dict[str, object]) -> dict[str, bytes]:
    return {f"v.{key}": encode(values[key], f"v.{key}").data for key in sorted(values)}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"lr": 0.1, "eps": 1e-8}, {"lr": 0.2, "eps": 1e-8}),
        ({"lr": 0.1}, {"lr": 0.1, "initial_lr": 0.1}),
        ({"lr": 0.1, "on": True}, {"on": True, "lr": 0.1}),
        ({"lr": 1}, {"lr": True}),
        ({"betas": (0.9, 0.99)}, {"betas": (0.9, 0.999)}),
        ({"betas": [0.9, 0.99]}, {"betas": (0.9, 0.99)}),
        ({"steps": {"a": 1}}, {"steps": {"a": 2}}),
        ({"rate": torch.ones(1)}, {"rate": 1.0}),
    ],
)
def test_what_has_changed_is_encoded_anew(first, then):
    watched = WatchedValues("v.{}")
    looked(watched, first)
    assert looked(watched, then) == encoded(then)
    assert list(watched.encoded) == sorted(watched.encoded) and not watched.tensors
    assert looked(watched, then) == encoded(then)


@pytest.mark.parametrize(
    "values", [{"a": [1, 2], "b": 1}, {"a": {"x": [1]}, "b": 1}, {"a": [[1], 2], "b": 1}]
)
def test_what_changes_in_its_place_is_seen(values):
    watched = WatchedValues("v.{}")
    before = looked(watched, values)
    inner = values["a"]
    while not isinstance(inner, list):
        inner = inner["x"]
    inner[-1] = 7
    assert looked(watched, values) == encoded(values) != before
    inner.append(8)
    assert looked(watched, values) == encoded(values)


def test_nothing_is_encoded_where_nothing_has_changed():
    watched = WatchedValues("v.{}")
    values = {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}
    before = looked(watched, values)
    assert all(
        one is other
        for one, other in zip(looked(watched, values).values(), before.values(), strict=True)
    )


def test_tensors_stand_apart_and_parameters_are_left_out():
    watched = WatchedValues("v[{!r}]")
    rate = torch.ones(1)
    watched.look({"lr": 0.1, "params": [torch.ones(3)], "param_names": ["w"]})
    watched.look({"lr": rate, "params": [torch.ones(3)], "param_names": ["w"]})
    assert watched.tensors == {"v['lr']": rate} and not watched.encoded


def test_what_cannot_be_encoded_has_no_bytes():
    watched = WatchedValues("v.{}")
    assert looked(watched, {"colour": Colour.RED}) == {"v.colour": b""}
