"""Attention: a sequence's bits do not depend on the batch, on padding, or on being packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mend.determinism import attention, sequences
from mend.determinism import rows as batch_rows
from mend.determinism.digests import same_bits
from mend.errors import NotDeterministic
from tests.unit.determinism.numbers import noise

pytestmark = pytest.mark.usefixtures("shape_level")


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


@pytest.mark.parametrize(
    "how",
    [
        {"is_causal": True},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
        {"attn_mask": torch.zeros(6, 6).masked_fill(~torch.ones(6, 6).bool().tril(), -torch.inf)},
        {"is_causal": True, "scale": 0.5},
    ],
    ids=["causal", "mask", "added mask", "scale"],
)
def test_attention_is_the_formula_within_rounding(how: dict[str, Any]) -> None:
    query, key, value = (noise(2, 3, 6, 4, seed=seed) for seed in (1, 2, 3))
    found = F.scaled_dot_product_attention(query, key, value, **how)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.allclose(found, plain(query, key, value, mask, how.get("scale", 0.5)), atol=1e-5)


def test_groups_of_heads_share_keys() -> None:
    query, key, value = noise(2, 6, 5, 4), noise(2, 2, 5, 4, seed=2), noise(2, 2, 5, 4, seed=3)
    found = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    repeated = [x.repeat_interleave(3, 1) for x in (key, value)]
    assert same_bits(found, F.scaled_dot_product_attention(query, *repeated))


def run(x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output and three gradients."""
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_padding_and_packing_change_nothing() -> None:
    """300 and 40 tokens: more than a leaf, and less."""
    lengths, heads = [300, 40], 2
    parts = [noise(1, heads, length, 4, seed=length) for length in lengths]
    grads = [noise(1, heads, length, 4, seed=length + 1) for length in lengths]
    alone = [run(part, grad) for part, grad in zip(parts, grads, strict=True)]
    with sequences(lengths):
        packed = run(torch.cat(parts, 2), torch.cat(grads, 2))
    padded_x, padded_grad = torch.zeros(2, heads, 300, 4), torch.zeros(2, heads, 300, 4)
    for row, length in enumerate(lengths):
        padded_x[row, :, :length], padded_grad[row, :, :length] = parts[row][0], grads[row][0]
    padded = run(padded_x, padded_grad)
    for which in range(4):
        assert same_bits(packed[which], torch.cat([each[which] for each in alone], 2))
        for row, length in enumerate(lengths):
            assert same_bits(padded[which][row : row + 1, :, :length], alone[row][which])


def test_packed_without_a_mask_sees_its_own_sequence() -> None:
    parts = [noise(1, 2, length, 4, seed=length) for length in (3, 5)]
    alone = [F.scaled_dot_product_attention(part, part, part) for part in parts]
    whole = torch.cat(parts, 2)
    with sequences([3, 5]):
        found = F.scaled_dot_product_attention(whole, whole, whole)
    assert same_bits(found, torch.cat(alone, 2))


@pytest.mark.parametrize("added", [False, True], ids=["mask", "added mask"])
def test_a_query_that_sees_no_key_is_zero_and_leaves_no_nan(added: bool) -> None:
    """Padding on the left makes such queries. They were NaN, where torch's own are 0, and the
    gradients of all keys and values with them."""
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[:2] = False
    shown = torch.zeros(6, 6).masked_fill(~mask, -torch.inf) if added else mask
    leaves = [noise(2, 3, 6, 4, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=shown)
    out.backward(noise(2, 3, 6, 4, seed=4))
    assert not out[:, :, :2].any()
    assert torch.allclose(out[:, :, 2:], plain(*leaves, mask, 0.5)[:, :, 2:], atol=1e-5)
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_a_mask_over_packed_sequences_is_refused() -> None:
    x = noise(1, 2, 8, 4)
    with sequences([3, 5]), pytest.raises(NotDeterministic, match="packed"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool))


@pytest.mark.parametrize(
    ("lengths", "rows"), [([4, 3], 1), ([4, 4], 2), ([4, 4, 4, 4], 2), ([8], 2), ([2, 2], 4)]
)
def test_attention_that_is_not_packed_as_the_lengths_say_is_refused(
    lengths: list[int], rows: int
) -> None:
    """It looked across the borders of sequences."""
    x = noise(rows, 2, 8, 4)
    with sequences(lengths), pytest.raises(NotDeterministic, match="across the borders"):
        F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_keys_of_several_rows_are_refused() -> None:
    x = noise(1, 2, 8, 4)
    with sequences([3, 5]), pytest.raises(NotDeterministic, match="other keys"):
        F.scaled_dot_product_attention(x, torch.cat([x, x]), torch.cat([x, x]))


def test_a_model_may_pad_its_packed_sequences() -> None:
    x = noise(2, 2, 5, 4)
    with sequences([3, 5]):
        found = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert same_bits(found, F.scaled_dot_product_attention(x, x, x, is_causal=True))


def test_packed_without_heads_is_packed_with_one() -> None:
    x = noise(8, 4)
    with sequences([3, 5]):
        with_heads = F.scaled_dot_product_attention(*(x[None, None],) * 3, is_causal=True)
        assert same_bits(F.scaled_dot_product_attention(x, x, x, is_causal=True), with_heads[0, 0])


@pytest.mark.parametrize("heads", [2, 4])
def test_dropout_of_packed_attention_is_that_of_padded(heads: int) -> None:
    """With 4 heads the weights have as many rows as there are tokens, and were taken for them."""
    x, padded = noise(1, heads, 8, 4), torch.zeros(2, heads, 5, 4)
    padded[0, :, :3], padded[1] = x[0, :, :3], x[0, :, 3:]
    how: dict[str, Any] = {"dropout_p": 0.5, "is_causal": True}
    torch.manual_seed(5)
    with sequences([3, 5]):
        packed = F.scaled_dot_product_attention(x, x, x, **how)
    torch.manual_seed(5)
    with batch_rows(0, 2):
        found = F.scaled_dot_product_attention(*(padded,) * 3, **how)
    assert same_bits(packed[0], torch.cat([found[0, :, :3], found[1]], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [5, 300])
def test_one_piece_is_what_is_composed(
    queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of one and a key for all rows are of one shape, so both ways must have equal bits."""
    mask = torch.ones(queries, 40, dtype=torch.bool).tril()
    mask[2] = False  # NaN on the way, which must not be left

    def both() -> list[Tensor]:
        x, *shared = (
            noise(2, heads, n, 8, seed=n) for heads, n in ((6, queries), (2, 40), (2, 40))
        )
        shared[1] = shared[1] * 2
        leaves = [each.to(dtype).requires_grad_() for each in (x, *shared)]
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
        out.backward(noise(*out.shape, seed=9).to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    piece = both()
    monkeypatch.setattr(attention, "_fits", lambda *_: False)
    composed = both()
    assert len(piece) == 4
    assert all(each.isfinite().all() for each in piece)
    assert all(same_bits(one, other) for one, other in zip(piece, composed, strict=True))
