"""State dicts become bytes and come back; what is no plain data is named."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, OrderedDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from mend.engine.compute.digest import digest_of_state
from mend.engine.compute.worker_pool import WorkerPool
from mend.engine.joining import plain_data
from mend.engine.joining.plain_data import DTYPES, Carried, Packing, unpack
from mend.errors import StateRefused

SAMPLE: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    3: [None, True, "text", b"\x00bytes", -(2**200), 2**63 - 1],
    "far": {"inf": float("inf"), "minus": float("-inf"), "zero": -0.0},
    "milestones": Counter({30: 1, 80: 2}),
    "order": OrderedDict([("b", 1), ("a", 2)]),
    "generator": random.Random(1).getstate(),
}


def back(value: Any) -> Any:
    return unpack("state", Packing("state", value).write())


def test_a_digest_without_the_bytes_is_that_of_the_bytes() -> None:
    """Of tensors of all widths, larger than a block, and not contiguous."""
    tensors = [torch.arange(0, 7).to(dtype) for dtype in DTYPES.values()]
    large = torch.arange(1_100_000, dtype=torch.float32).reshape(1000, 1100).t()
    packing = Packing("state", {**SAMPLE, "all": tensors, "large": large, "none": large[:0]})
    assert packing.digest() == digest_of_state(packing.write())


def test_plain_values_come_back_with_their_types() -> None:
    found = back(SAMPLE)
    assert found == SAMPLE
    assert type(found["milestones"]) is Counter
    assert list(found["order"]) == ["b", "a"]
    assert str(found["far"]["zero"]) == "-0.0"
    assert back({"x": float("nan")})["x"] != 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_keep_type_shape_and_bits(dtype: torch.dtype) -> None:
    """One of a single byte before it: each lies where its type needs it."""
    values = torch.arange(0, 6).reshape(2, 3).t().to(dtype)
    found = back({"first": torch.zeros(1, dtype=torch.bool), "it": values, "none": values[:0]})
    for name, expected in (("it", values), ("none", values[:0])):
        carried = found[name]
        assert isinstance(carried, Carried)
        assert (carried.device, carried.placements) == ("cpu", "")
        assert (carried.tensor.dtype, carried.tensor.shape) == (dtype, expected.shape)
        assert carried.tensor.tolist() == expected.tolist()


def test_numpy_arrays_travel() -> None:
    key = np.random.RandomState(3).get_state(legacy=False)["state"]["key"]
    assert np.array_equal(back({"key": key})["key"], key)


def test_equal_contents_are_equal_bytes_whatever_the_order_of_a_dict() -> None:
    one, other = {"b": torch.ones(2), "a": 1}, {"a": 1, "b": torch.ones(2)}
    assert torch.equal(Packing("x", one).write(), Packing("x", other).write())


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"state": [{"hook": print}]}, "x['state'][0]['hook'] is a builtins.builtin_function"),
        ({"share": Fraction(1, 3)}, "x['share'] is a fractions.Fraction"),
        ({"type": torch.float32}, "x['type'] is a torch.dtype"),
        ({"rate": np.float64(0.1)}, "x['rate'] is a numpy.float64"),
        ({(1, 2): 3}, "x[(1, 2)] is a key that is a builtins.tuple"),
        ({"z": torch.zeros(2, dtype=torch.complex64)}, "of torch.complex64, a torch.Tensor"),
        ({"s": torch.zeros(2).to_sparse()}, "x['s'] is torch.sparse_coo of torch.float32"),
    ],
)
def test_value_that_cannot_travel_is_named(value: Any, place: str) -> None:
    with pytest.raises(StateRefused) as error:
        Packing("x", value)
    assert place in str(error.value)
    assert "which cannot travel" in str(error.value)


def test_a_state_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(StateRefused, match="levels deep; 64 can travel"):
        Packing("x", value)


def test_damaged_bytes_are_refused_whatever_they_are() -> None:
    """Any single byte of the header set to another value: refused, or a value of the same kinds."""
    whole = Packing("x", {"a": torch.arange(5), "b": [1.5, "c"]}).write()
    rng = random.Random(5)
    for place in range(int.from_bytes(bytes(whole[:8].tolist()), "little") + 8):
        data = whole.clone()
        data[place] = rng.randrange(256)
        with contextlib.suppress(StateRefused):
            unpack("it", data)
    for size in (0, 3, 8, len(whole) - 1):
        with pytest.raises(StateRefused, match="it is damaged"):
            unpack("it", whole[:size])


def test_a_copy_shared_by_threads_and_in_memory_of_before_has_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_data, "PORTION_BYTES", 16)
    packing = Packing(
        "x", {"a": torch.arange(13.0), "b": torch.arange(9, dtype=torch.int8), "c": 1}
    )
    whole_B, pool = packing.write(), WorkerPool(3)
    room_B = torch.full((packing.size + 5,), 7, dtype=torch.uint8)
    assert torch.equal(packing.write(room_B, pool.each), whole_B)
    assert torch.equal(room_B[: packing.size], whole_B)
    assert torch.equal(packing.write(torch.zeros(packing.size - 1, dtype=torch.uint8)), whole_B)
    turned = torch.arange(6.0).view(2, 3).T
    assert torch.equal(
        Packing("x", turned).write(None, pool.each), Packing("x", turned.contiguous()).write()
    )
    assert pool.close() == []


def test_a_tensor_that_is_not_contiguous_takes_no_memory_beside_the_copy() -> None:
    """All copies of a state are made together, so these would be as large as the state."""
    packing = Packing("x", [torch.ones(64, 32).T for _ in range(3)])
    room_B = torch.empty(packing.size, dtype=torch.uint8)
    with torch.profiler.profile() as seen:
        packing.write(room_B)
    assert not {"aten::clone", "aten::contiguous"} & {each.name for each in seen.events()}
