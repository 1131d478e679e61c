"""A weight that is used twice has a gradient for each use."""

from __future__ import annotations

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
