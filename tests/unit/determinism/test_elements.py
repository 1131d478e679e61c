"""Elementwise operators whose bits would depend on the element's place in the tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mend.determinism import DeterministicTrainer, enable, laws
from mend.determinism.digests import same_bits
from mend.determinism.laws import broken_laws
from mend.errors import NotDeterministic
from tests.unit.determinism.numbers import noise

ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rsqrt": lambda x: x.rsqrt(),
    "rsqrt_": lambda x: x.clone().rsqrt_(),
    "** -0.5": lambda x: x**-0.5,
    "pow_": lambda x: x.clone().pow_(-0.5),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ROOTS)
def test_roots_of_narrow_floats_do_not_depend_on_the_place(name: str, dtype: torch.dtype) -> None:
    """A norm written by hand takes them under autocast."""
    x = (noise(96).abs() + 0.01).to(dtype)
    with enable(1, "shape"):
        whole = ROOTS[name](x)
        assert all(same_bits(ROOTS[name](x[at : at + 12]), whole[at : at + 12]) for at in range(84))
    assert whole.dtype == dtype
    assert same_bits(whole, x.float().rsqrt().to(dtype))


def test_powers_have_torchs_values_and_types() -> None:
    tensors = noise(7), torch.arange(1, 7), torch.tensor(True), noise(4).bfloat16()
    plain = [x**power for x in tensors for power in (2, 3, 0.5, -1.0, 0)]
    with enable(1, "shape"):
        ours = [x**power for x in tensors for power in (2, 3, 0.5, -1.0, 0)]
        assert torch.arange(1, 5).rsqrt().dtype == torch.float32
    for one, other in zip(plain, ours, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one.double(), other.double(), rtol=0.01, equal_nan=True)


class Normed(nn.Module):
    """With the norm that is written by hand in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        made: Tensor = self.head(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return made


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def trained(microbatches: int) -> str:
    with enable(7, level="shape"):
        model = Normed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = DeterministicTrainer(
            model, optimizer, 7, level="shape", microbatches=microbatches
        )
        for step in range(2):
            trainer.step(noise(8, 12, 32, seed=step), loss_of)
        return trainer.digest()


def test_a_norm_by_hand_under_autocast_has_equal_bits_in_every_microbatch() -> None:
    assert len({trained(microbatches) for microbatches in (1, 2, 8)}) == 1


SCALED: dict[str, Callable[[Tensor], object]] = {
    "add": lambda x: x.add(x, alpha=0.3),
    "sub_": lambda x: x.clone().sub_(x, alpha=0.3),
    "rsub": lambda x: torch.rsub(x, x, alpha=0.3),
    "_foreach_add": lambda x: torch._foreach_add([x], [x], alpha=0.3),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_sums_of_narrow_floats_are_refused_by_name(name: str) -> None:
    x = noise(5)
    with enable(1, "shape"):
        SCALED[name](x)
        x.bfloat16().add(x.bfloat16()) - 1
        with pytest.raises(NotDeterministic, match=rf"aten\.{name}\."):
            SCALED[name](x.bfloat16())


def test_kernels_of_narrow_floats_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_vectors(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        body = len(x) // 16 * 16
        return torch.cat([x[:body] * 3, x[body:].bfloat16().to(x.dtype) * 3])

    monkeypatch.setattr(laws, "KERNELS", {"triple": by_vectors, "rsqrt": by_vectors})
    broken = broken_laws.__wrapped__()
    assert broken == ("triple", "rsqrt", "triple of torch.float16")
