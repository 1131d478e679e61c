"""Linear layers and matmul: leaves of a batch are its sequences, whatever the module's shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mend.determinism import rows, sequences
from mend.determinism.digests import same_bits
from mend.errors import NotDeterministic, UsageError
from tests.unit.determinism.numbers import noise

pytestmark = pytest.mark.usefixtures("shape_level")


def gradients(module: nn.Module, x: Tensor, rows: slice) -> list[Tensor]:
    module.zero_grad()
    out = module(x[rows])
    (out * noise(len(x), *out.shape[1:], seed=7)[rows]).sum().backward()
    return [each.grad.clone() for each in module.parameters()]  # type: ignore[union-attr]


class ByHand(nn.Module):
    """What people write: `@`, addmm as in GPT-2's Conv1D, einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(noise(16, 8)), nn.Parameter(noise(8, 4))
        self.add = nn.Parameter(noise(4))

    def forward(self, x: Tensor) -> Tensor:
        wide = x @ self.one
        return torch.addmm(self.add, wide.view(-1, 8), self.two).view(*x.shape[:-1], 4)


@pytest.mark.parametrize("shape", [(8, 16), (8, 5, 16), (8, 2, 3, 16)])
@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 4), ByHand], ids=["Linear", "by hand"])
def test_gradients_of_halves_add_up(shape: tuple[int, ...], make: type[nn.Module]) -> None:
    if make is ByHand and len(shape) > 2:
        shape = (8, 4, 16)  # flattened, tokens are leaves: sequences of a power of two
    module, x = make(), noise(*shape)
    whole = gradients(module, x, slice(0, 8))
    parts = [gradients(module, x, rows) for rows in (slice(0, 4), slice(4, 8))]
    for all_rows, one, other in zip(whole, *parts, strict=True):
        assert same_bits(all_rows, one + other)


def test_linear_is_the_formula_within_rounding() -> None:
    module, x = nn.Linear(16, 4), noise(8, 5, 16).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, module.weight.sum(0).expand(8, 5, 16), atol=1e-5)
    summed = x.detach().sum((0, 1))
    assert torch.allclose(module.weight.grad, summed.expand(4, 16), atol=1e-4)  # type: ignore[arg-type]
    assert torch.allclose(module.bias.grad, torch.full((4,), 40.0))  # type: ignore[arg-type]


def test_packed_is_padded() -> None:
    module, lengths = nn.Linear(16, 4), [3, 5, 1, 4]
    parts, grads = noise(13, 16).split(lengths), noise(13, 4, seed=3).split(lengths)
    with sequences(lengths):
        module(torch.cat(parts)[None]).backward(torch.cat(grads)[None])
    packed = [each.grad.clone() for each in module.parameters()]  # type: ignore[union-attr]
    module.zero_grad()
    pad = nn.utils.rnn.pad_sequence
    module(pad(list(parts), True)).backward(pad(list(grads), True))
    for one, other in zip(packed, module.parameters(), strict=True):
        assert same_bits(one, other.grad)  # type: ignore[arg-type]


class Flattened(nn.Module):
    """Of (B, T, D) it makes (B * T, D), as many do before a norm, a linear layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.words = nn.LayerNorm(16), nn.Linear(16, 4), nn.Embedding(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        words = torch.arange(x.shape[1]).repeat(len(x)) % 3
        flat = self.norm(x.reshape(-1, 16) + self.words(words))
        out: Tensor = F.dropout(self.layer(flat), 0.5)
        return out.view(*x.shape[:-1], 4)


@pytest.mark.parametrize("tokens", [5, 8])
def test_rows_that_a_model_flattens_stay_rows(tokens: int) -> None:
    """5 tokens are no power of two: halves of 8 * 5 rows are no nodes of a tree over rows."""
    module, x = Flattened(), noise(8, tokens, 16)
    found = []
    for part in (slice(0, 8), slice(0, 4), slice(4, 8)):
        torch.manual_seed(3)
        with rows(part.start, part.stop - part.start):
            found.append(gradients(module, x, part))
    for whole, one, other in zip(*found, strict=True):
        assert same_bits(whole, one + other)


def test_a_first_dimension_that_is_not_the_batch_is_refused() -> None:
    layer = nn.Linear(16, 4)
    with rows(0, 3), pytest.raises(NotDeterministic, match="not the batch"):
        layer(noise(8, 3, 16)).sum().backward()


def test_backward_outside_of_its_sequences_is_refused() -> None:
    module = nn.Linear(16, 4)
    with sequences([3, 5]):
        out = module(noise(1, 8, 16)).sum()
    with pytest.raises(UsageError, match="sequences"):
        out.backward()


@pytest.mark.parametrize("lead", [(), (3,), (2, 1)])
def test_shapes_of_matmul(lead: tuple[int, ...]) -> None:
    a, b = noise(*lead, 4, 6), noise(2, 3, 6, 5)
    found = a.expand(2, 3, 4, 6) @ b if not lead or lead == (3,) else a @ b
    assert torch.allclose(found, torch.einsum("...mk,...kn->...mn", a.expand(2, 3, 4, 6), b))
    assert (a[..., 0, :] @ noise(6)).shape == lead
    assert (noise(4) @ a).shape == (*lead, 6)
    assert F.linear(a, noise(6)).shape == (*lead, 4)


def test_inference_mode_gives_the_same_bits() -> None:
    module, x = nn.Linear(16, 4), noise(8, 5, 16)
    with torch.inference_mode():
        inferred = module(x).clone()
    assert same_bits(inferred, module(x).detach())


def test_autocast_reaches_it() -> None:
    module, x = nn.Linear(16, 4), noise(8, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        whole, part = module(x), module(x[3:4])
    assert whole.dtype == torch.bfloat16
    assert same_bits(whole[3:4], part)


def test_unsupported_linear_is_refused_by_name() -> None:
    with pytest.raises(NotDeterministic, match="float64"):
        F.linear(noise(3, 4).double(), noise(2, 4).double())
    x = noise(3, 4).requires_grad_()
    with pytest.raises(NotDeterministic, match="second derivative"):
        torch.autograd.grad(F.linear(x, noise(2, 4)).sum(), x, create_graph=True)
