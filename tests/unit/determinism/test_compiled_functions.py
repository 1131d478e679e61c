"""Elementwise functions compiled at level shape. Here on a CPU, through the parts of torch's
compiler that need no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mend.determinism import Determinism, compiled_functions, elementwise, enable
from mend.determinism.digests import same_bits
from mend.errors import NotDeterministic, UsageError


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Determinism]:
    monkeypatch.setattr(compiled_functions, "DEVICES", ("cpu",))
    monkeypatch.setattr(compiled_functions, "COMPILER", {"backend": "aot_eager"})
    torch._dynamo.reset()
    with enable(3, "shape") as state:
        yield state


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def tensors(*shapes: tuple[int, ...], needs: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator).requires_grad_(place < needs)
        for place, shape in enumerate(shapes)
    ]


def result_and_gradients(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    result = function(*given)
    needing = [each for each in given if each.requires_grad]
    weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
    return [result, *torch.autograd.grad((result * weights).sum(), needing)]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (swiglu, tensors((4, 6, 8), (4, 6, 8))),
        (swiglu, tensors((1, 8), (1, 8), needs=1)),
        (rotated, tensors((4, 6, 2, 8), (6, 1, 4), (6, 1, 4), needs=1)),
    ],
)
def test_compiled_function_computes_value_and_gradients(
    shape: Determinism, function: Callable[..., Tensor], given: list[Tensor]
) -> None:
    expected = result_and_gradients(function, given)
    found = result_and_gradients(elementwise(function), given)
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected))
    assert shape.settings["compiled"] == function.__name__


def test_settings_list_every_compiled_function_once(shape: Determinism) -> None:
    given = tensors((4, 8), (4, 8))
    fused = elementwise(swiglu)
    fused(*given)
    fused(*[each.double() for each in given])
    elementwise(rotated)(given[0], given[1][:, :4], given[1][:, 4:])
    assert shape.settings["compiled"] == "rotated, swiglu"


def test_next_settings_list_a_function_that_was_checked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_functions, "DEVICES", ("cpu",))
    monkeypatch.setattr(compiled_functions, "COMPILER", {"backend": "aot_eager"})
    fused = elementwise(swiglu)
    for _ in range(2):
        with enable(3, "shape") as state:
            fused(*tensors((4, 8), (4, 8)))
            assert state.settings["compiled"] == "swiglu"


def normalized(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def with_noise(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


@pytest.mark.parametrize(
    ("function", "shapes", "name"),
    [
        (normalized, [(4, 8)], r"aten.sum.* in normalized"),
        (with_noise, [(4, 8)], r"aten.randn.* in with_noise"),
        (scaled, [(4, 8), (8,)], r"aten.sum.* in scaled or in its gradient"),
        (torch.mm, [(4, 4), (4, 4)], r"aten.mm.* in .*mm"),
        (F.linear, [(4, 4), (4, 4)], r"aten.linear.* in linear"),
    ],
)
def test_operator_that_is_not_elementwise_is_refused_by_name(
    shape: Determinism, function: Callable[..., Tensor], shapes: list[Any], name: str
) -> None:
    with pytest.raises(NotDeterministic, match=name):
        elementwise(function)(*tensors(*shapes))
    assert "compiled" not in shape.settings


def test_function_whose_halves_differ_is_refused(shape: Determinism) -> None:
    with pytest.raises(NotDeterministic, match="half of the batch"):
        elementwise(lambda x: x.flip(0))(torch.arange(8.0))


def test_compiler_whose_bits_depend_on_the_batch_is_refused(
    shape: Determinism, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            made = graph(*args)
            rows = max(made[0].shape[0], 1)
            return [each + 1e-6 if rows > 2 else each for each in made]

        return run

    monkeypatch.setattr(compiled_functions, "COMPILER", {"backend": planted})
    with pytest.raises(NotDeterministic, match="half of the batch"):
        elementwise(swiglu)(*tensors((4, 8), (4, 8), needs=0))


def test_function_with_a_branch_on_data_is_refused(shape: Determinism) -> None:
    @elementwise
    def clipped(x: Tensor) -> Tensor:
        return x.abs() if float(x.max()) > 0 else x

    with pytest.raises(NotDeterministic, match=r"cannot compile .*clipped"):
        clipped(torch.ones(4))


def test_arguments_and_results_that_are_no_tensors_are_refused(shape: Determinism) -> None:
    with pytest.raises(UsageError, match="argument 1 of scaled is not a tensor but float"):
        elementwise(scaled)(torch.ones(4), 2.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="returns no tensor"):
        elementwise(lambda x: x.chunk(2))(torch.ones(4))  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="writes into its arguments"):
        elementwise(lambda x: x.mul_(2))(torch.ones(4))


def test_function_runs_as_it_is_on_a_cpu_and_without_level_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("compiled")

    monkeypatch.setattr(torch, "compile", never)
    given = tensors((4, 8), (4, 8))
    with enable(3, "shape") as state:
        expected = result_and_gradients(swiglu, given)
        assert all(map(same_bits, result_and_gradients(elementwise(swiglu), given), expected))
        assert "compiled" not in state.settings
    monkeypatch.setattr(compiled_functions, "DEVICES", ("cpu",))
    result_and_gradients(elementwise(swiglu), given)
