"""Cross-entropy over a cut vocabulary: one rank is torch's. Several: process/test_equal_bits.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mend.determinism import cross_entropy, enable
from mend.determinism.digests import same_bits
from mend.errors import UsageError
from tests.unit.determinism.numbers import noise

pytestmark = pytest.mark.usefixtures("mesh")


@pytest.mark.usefixtures("shape_level")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("words", [24, 7])
def test_one_rank_is_the_loss(reduction: str, words: int) -> None:
    targets = torch.arange(10) % words
    targets[3] = -100
    found = []
    for function in (F.cross_entropy, cross_entropy):
        logits = noise(10, words).requires_grad_()
        loss = function(logits, targets, reduction=reduction)  # type: ignore[operator]
        loss.sum().backward()
        assert logits.grad is not None
        found.append((loss.detach(), logits.grad))
    assert same_bits(found[0][0], found[1][0])
    assert same_bits(found[0][1], found[1][1])


@pytest.mark.usefixtures("shape_level")
@pytest.mark.parametrize("word", [-1, 7])
def test_a_target_that_is_no_word_is_refused(word: int) -> None:
    """F.cross_entropy refuses it. No rank had such a word, so its loss was 0."""
    with pytest.raises(UsageError, match=r"outside of 0 to 6 .*ignore_index=-100"):
        cross_entropy(noise(2, 7), torch.tensor([0, word]))


def test_misuse_is_refused() -> None:
    with pytest.raises(UsageError, match="under enable"):
        cross_entropy(noise(2, 3), torch.tensor([0, 1]))
    with enable(1, "shape"), pytest.raises(UsageError, match="flatten them"):
        cross_entropy(noise(2, 3, 4), torch.zeros(2, 3, dtype=torch.long))
