"""A digest moves with every bit, name, shape and option, and with nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mend.determinism import digest, optimizer_digest, weight_digest
from mend.determinism.digests import first_difference, same_bits, tensor_hash
from mend.errors import UsageError


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def test_equal_models_have_equal_digests_and_one_bit_is_seen() -> None:
    one, other = model(), model()
    assert weight_digest(one) == weight_digest(other)
    with torch.no_grad():
        other[0].weight.view(torch.int32)[2, 1] ^= 1  # type: ignore[index, operator]
    assert weight_digest(one) != weight_digest(other)


def test_buffers_count() -> None:
    one, other = model(), model()
    other[1].running_mean += 1  # type: ignore[index, operator]
    assert weight_digest(one) != weight_digest(other)


def test_wrappers_do_not_change_it() -> None:
    inner = model()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = inner

    assert weight_digest(Wrapped()) == weight_digest(inner)


def test_the_two_zeros_and_the_dtype_differ() -> None:
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.zeros(4)) != digest(torch.zeros(4, dtype=torch.int32))
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
    transposed = torch.arange(6.0).view(2, 3).t()
    assert digest(transposed) == digest(transposed.contiguous())


def test_an_optimizer_counts_with_its_options_and_its_state() -> None:
    digests = []
    for rate, steps in ((0.1, 0), (0.1, 1), (0.1, 2), (0.2, 2)):
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=rate)
        for _ in range(steps):
            for parameter in trained.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        digests.append(optimizer_digest(optimizer))
    assert len(set(digests)) == 4


def test_options_of_an_optimizer_count_and_its_parameters_do_not() -> None:
    def of(rate: float, weight: float) -> str:
        return optimizer_digest(torch.optim.SGD([nn.Parameter(torch.tensor([weight]))], lr=rate))

    assert of(0.1, 1.0) == of(0.1, 2.0) != of(0.2, 1.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}), ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}), ([1, [2]], [[1], 2]),
        ({"a": np.zeros(2)}, {"a": np.zeros(2, dtype=np.float32)}), ({"a": None}, {"a": "None"}),
    ],
)  # fmt: skip
def test_states_that_differ_have_digests_that_differ(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_the_order_of_a_dict_does_not_count() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [{"a": {1, 2}}, {"a": object()}, {"a": np.array([object()])}])
def test_value_without_an_order_or_bytes_is_refused_by_name(value: Any) -> None:
    """The bytes of an array of objects are addresses, which were taken for its content."""
    with pytest.raises(UsageError, match=r"\.a is a"):
        digest(value)


def test_the_depth_has_a_bound() -> None:
    value: list[Any] = []
    for _ in range(40):
        value = [value]
    with pytest.raises(UsageError, match="nested deeper"):
        digest(value)


def test_one_element_of_a_larger_tensor_has_bytes() -> None:
    """It is contiguous with a stride that view() refuses: a loss may be one."""
    one = torch.arange(32.0).view(2, 16)[:1, 0]
    assert one.stride() == (16,)
    assert same_bits(one, torch.tensor([0.0]))
    assert tensor_hash(one) == tensor_hash(torch.tensor([0.0]))


def test_names_that_run_together_are_told_apart() -> None:
    one, other = {"a=1.b=2.c": 3, "d": 4}, {"a": 1, "b=2.c=3.d": 4}
    assert digest(one) != digest(other)


def test_first_difference_is_that_of_a_name_a_bit_or_a_type() -> None:
    one = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert first_difference(one, {"b": torch.ones(2), "a": torch.zeros(2)}) is None
    assert first_difference(one, {**one, "b": torch.tensor([1.0, 2.0])}) == "b"
    assert first_difference(one, {**one, "a": -torch.zeros(2)}) == "a"
    assert first_difference(one, {**one, "a": torch.zeros(2, dtype=torch.int32)}) == "a"
    assert first_difference({"a": torch.zeros(2)}, one) == "b"
    assert first_difference(one, {"a": torch.zeros(2)}) == "b"
