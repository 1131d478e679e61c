"""Where sequences begin: packing and its way back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mend.determinism import enable, rows, sequences
from mend.determinism.digests import same_bits
from mend.determinism.layout import Layout, by_sequence, layout, pack, unpack
from mend.errors import NotDeterministic, UsageError
from tests.unit.determinism.numbers import noise


def test_packing_is_the_way_back() -> None:
    x = torch.arange(18.0).view(9, 2)
    padded = unpack(x, [4, 5])
    assert padded.shape == (2, 5, 2)
    assert padded[0, 4].tolist() == [0, 0]
    assert torch.equal(pack(padded, [4, 5]), x)


def test_a_row_is_a_sequence_unless_told() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert by_sequence(x, Layout()).shape == (2, 3, 4)
    assert by_sequence(x.view(6, 4), Layout()).shape == (6, 1, 4)
    assert by_sequence(x[0, 0], Layout()).shape == (1, 1, 4)
    assert by_sequence(x.view(1, 6, 4), Layout((2, 4))).shape == (2, 4, 4)
    assert by_sequence(x, Layout((2, 5))).shape == (2, 3, 4), "of other tokens"


def test_layouts_nest_and_end() -> None:
    with rows(8), sequences([2, 3]):
        assert layout() == Layout((2, 3), 8)
        with rows(16):
            assert layout() == Layout((2, 3), 16)
    assert layout() == Layout()


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_lengths_that_cannot_be_are_refused(lengths: list[int]) -> None:
    with pytest.raises(UsageError, match="lengths"), sequences(lengths):
        pass


def test_a_thread_of_autograd_has_the_layout_of_the_training() -> None:
    """Gradients on a GPU are computed in threads that have no context of Python's."""
    found: list[Layout] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: found.append(Context().run(layout)))
    with rows(3, 4):
        x.sum().backward()
        assert Context().run(layout) == Layout()
    assert found == [Layout(first_row=3, count=4)]


LENGTHS, HEADS, WIDTH = (3, 150, 6, 2), 4, 8

PER_HEAD: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "rms_norm": ((WIDTH,), lambda x, w: F.rms_norm(x, (WIDTH,), w)),
    "rms_norm of heads": ((HEADS, WIDTH), lambda x, w: F.rms_norm(x, (HEADS, WIDTH), w)),
    "layer_norm": ((WIDTH,), lambda x, w: F.layer_norm(x, (WIDTH,), w)),
    "bias of layer_norm": ((WIDTH,), lambda x, w: F.layer_norm(x, (WIDTH,), None, w)),
    "linear": ((WIDTH, WIDTH), F.linear),
    "bias": ((WIDTH,), lambda x, w: F.linear(x, torch.eye(WIDTH), w)),
    "scale": ((WIDTH,), lambda x, w: x * w),
    "scale of a head": ((HEADS, 1), lambda x, w: x * w),
    "scale of four dimensions": ((1, 1, 1, WIDTH), lambda x, w: x * w),
    "scale of three dimensions": ((1, 1, HEADS * WIDTH), lambda x, w: x.flatten(-2) * w),
    "embedding": ((5, WIDTH), lambda x, w: F.embedding((x[..., 0] * 9).long() % 5, w)),
    "sum": ((WIDTH,), lambda x, w: (x * w).sum()[None]),
}


def gradient(
    call: Callable[[Tensor, Tensor], Tensor], x: Tensor, shape: tuple[int, ...]
) -> list[Tensor]:
    """The sum of the output, and of the weight the gradient of its product with x."""
    weight = noise(*shape, seed=3).requires_grad_()
    out = call(x, weight)
    flat = x if out.dim() == x.dim() else x.flatten(-2)
    total = (out * flat if out.dim() > 1 else out).sum()
    total.backward()
    assert weight.grad is not None
    return [total.detach(), weight.grad]


@pytest.mark.parametrize("name", PER_HEAD)
def test_packed_is_padded_where_tokens_have_heads(name: str) -> None:
    shape, call = PER_HEAD[name]
    parts = [noise(length, HEADS, WIDTH, seed=length) for length in LENGTHS]
    packed = torch.cat(parts)
    padded = unpack(packed, LENGTHS)
    with enable(1, "shape"):
        expected = gradient(call, padded, shape)
        with sequences(LENGTHS):
            for x in (packed[None], packed):
                if "dimensions" in name and x.dim() == 3:
                    continue
                for found, right in zip(gradient(call, x, shape), expected, strict=True):
                    assert same_bits(found, right)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "linear", "scale", "bias"])
def test_tokens_behind_heads_are_refused_where_they_are_packed(name: str) -> None:
    shape, call = PER_HEAD[name]
    x = noise(1, HEADS, 9, WIDTH)
    with (
        enable(1, "shape"),
        sequences((4, 5)),
        pytest.raises(NotDeterministic, match=r"\(1, 4, 9, 8\) inside sequences.*put them first"),
    ):
        gradient(call, x, shape)


def test_sums_without_tokens_are_those_of_torch() -> None:
    x = noise(1, 9, HEADS, 9)
    with enable(1, "shape"), sequences((4, 5)):
        for dims in ((-1,), (2,), (2, 3), (0,), (0, 2), (1,), (0, 1, 3)):
            for keeps in (False, True):
                found = x.sum(dims, keeps)
                assert found.shape == torch.sum(x.double(), dims, keeps).shape
                assert torch.allclose(found.double(), x.double().sum(dims, keeps), atol=1e-4)
        assert noise(4, 9).sum().dim() == 0, "a weight that has as many columns as there are tokens"
