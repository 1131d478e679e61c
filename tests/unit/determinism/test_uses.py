"""A weight that is used twice has a gradient for each use."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mend.determinism import DeterministicTrainer, enable
from mend.determinism.trainer import _GradientSums
from mend.determinism.uses import separate_uses, slots_of, tied_parameters
from mend.errors import NotDeterministic


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight
        self.other = nn.Linear(3, 3)


def test_weights_with_two_names_are_tied() -> None:
    model = Tied()
    assert [id(each) for each in tied_parameters(model)] == [id(model.words.weight)]
    assert tied_parameters(nn.Linear(2, 2)) == []


def test_slots_last_as_long_as_the_with() -> None:
    model = Tied()
    with separate_uses(tied_parameters(model)):
        assert slots_of(model.words.weight) is not None
        assert slots_of(model.other.weight) is None
    assert slots_of(model.words.weight) is None


def test_two_uses_of_one_kind_are_refused() -> None:
    model = Tied()
    with separate_uses(tied_parameters(model)):
        slots = slots_of(model.words.weight)
        assert slots is not None
        slots.put("embedding", torch.zeros(1))
        slots.put("linear", torch.ones(1))
        assert slots.take().keys() == {"embedding", "linear"}
        slots.put("linear", torch.ones(1))
        with pytest.raises(NotDeterministic, match="used twice by linear"):
            slots.put("linear", torch.ones(1))


class Words(Tied):
    def forward(self, words_BT: Tensor) -> Tensor:
        x = self.words(words_BT)
        return cast(Tensor, self.head(x + self.other(x).tanh()))


def trained(microbatches: int, autocast: bool) -> str:
    def loss_of(model: nn.Module, words_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(words_BT)
        return F.cross_entropy(logits.flatten(0, 1), words_BT.flatten())

    with enable(7, level="shape"):
        torch.manual_seed(0)
        model = Words()
        trainer = DeterministicTrainer(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), 7, level="shape",
            microbatches=microbatches,
        )  # fmt: skip
        for _ in range(2):
            trainer.step(torch.randint(0, 5, (4, 8)), loss_of)
        return trainer.digest()


@pytest.mark.parametrize("autocast", [False, True])
def test_tied_weights_have_equal_bits_in_every_microbatch(autocast: bool) -> None:
    """Autograd added the uses of each microbatch first, and rounded gradients under autocast."""
    assert len({trained(microbatches, autocast) for microbatches in (1, 2, 4)}) == 1


def test_tied_weights_on_several_ranks_are_refused() -> None:
    parameters = _GradientSums(nn.Linear(2, 2), True, True)
    assert not parameters.are_wide
    with pytest.raises(NotDeterministic, match="used twice, or on GPUs are not in fp32"):
        _GradientSums(Tied(), True, True)
    assert not _GradientSums(Tied(), False, True).are_wide


class Uses(nn.Module):
    """Uses its weights as `forward` says."""

    def __init__(self, use: Callable[[Uses, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.layer, self.norm = nn.Embedding(8, 8), nn.Linear(8, 8), nn.RMSNorm(8)
        self.experts, self.use = nn.Parameter(torch.eye(8).repeat(2, 1, 1)), use

    def forward(self, words_BT: Tensor) -> Tensor:
        return self.use(self, self.words(words_BT))


Use = Callable[[Uses, Tensor], Tensor]


def step(use: Use, strict: bool = True, is_named: bool = False) -> dict[str, int]:
    with enable(7, "shape", strict=strict) as state:
        model = Uses(use)
        if is_named:
            model.head_weight = model.words.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = DeterministicTrainer(model, optimizer, 7, level="shape", microbatches=2)
        words = torch.arange(8).view(2, 4)
        trainer.step(words, lambda model, batch: model(batch).square().mean())
        return state.unreached


TWICE: dict[str, Use] = {
    "words": lambda model, x: F.linear(x, model.words.weight),
    "words, by @": lambda model, x: x @ model.words.weight.t(),
    "layer": lambda model, x: model.layer(model.layer(x).tanh()),
    "norm": lambda model, x: model.norm(model.layer(model.norm(x))),
    "layer, decayed": lambda model, x: model.layer(x) + model.layer.weight.square().mean(),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_weight_used_twice_under_one_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotDeterministic, match=rf"{name.split(',')[0]}.weight, which is used tw"):
        step(TWICE[name])
    assert any("used twice" in each for each in step(TWICE[name], strict=False))


COMPUTED: dict[str, Use] = {
    "scaled": lambda model, x: F.linear(x, model.layer.weight * 0.3),
    "LoRA": lambda model, x: F.linear(x, model.layer.weight + model.experts[0] @ model.experts[1]),
    "cast": lambda model, x: F.linear(x.bfloat16(), model.layer.weight.bfloat16()).float(),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_layer_whose_weight_is_computed_is_refused(name: str) -> None:
    """Its gradient is rounded in each part of the batch, and then computed with."""
    with pytest.raises(NotDeterministic, match="a layer's weight, which is computed"):
        step(COMPUTED[name])


def test_parts_of_a_weight_and_a_second_name_are_not_refused() -> None:
    def use(model: Uses, x: Tensor) -> Tensor:
        gate, up = model.layer.weight.chunk(2)
        x = torch.cat([F.linear(x, gate), F.linear(x, up)], -1)
        return x @ model.experts[0] @ model.experts[1].t()

    assert step(use) == {}
    assert step(TWICE["words"], is_named=True) == {}
    with pytest.raises(NotDeterministic, match="used twice"):
        step(lambda model, x: x @ model.experts[1] @ model.experts[1].t())
