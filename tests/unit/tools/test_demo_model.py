"""The demo's model: causal, of the promised size; its data and rate follow their arguments only."""

from __future__ import annotations

import torch

from mend.tools.demo_model import SIZES, ByteGPT, Windows, held_out_loss, learning_rate, loss_of


def test_a_byte_is_predicted_from_earlier_bytes_only() -> None:
    torch.manual_seed(0)
    model = ByteGPT(SIZES["tiny"])
    text_BT = torch.randint(256, (1, 16))
    other_BT = text_BT.clone()
    other_BT[0, 10] += 1
    other_BT %= 256
    difference_T = (model(text_BT) - model(other_BT)).abs().amax(dim=(0, 2))
    assert difference_T[:10].max() == 0
    assert difference_T[10:].min() > 0


def test_the_small_size_is_about_a_million_parameters() -> None:
    numel = sum(parameter.numel() for parameter in ByteGPT(SIZES["small"]).parameters())
    assert 500_000 <= numel <= 1_000_000


def test_the_first_loss_is_that_of_guessing() -> None:
    torch.manual_seed(0)
    windows = Windows(bytes(range(256)) * 4, SIZES["tiny"], seed=0)
    loss = loss_of(ByteGPT(SIZES["tiny"]), windows.next()).item()
    assert abs(loss - 5.545) < 0.2  # ln 256


def test_windows_follow_their_seed_and_not_the_global_one() -> None:
    text = bytes(range(256)) * 4
    first = Windows(text, SIZES["tiny"], seed=1)
    torch.manual_seed(5)
    again, other = Windows(text, SIZES["tiny"], seed=1), Windows(text, SIZES["tiny"], seed=2)
    batch = first.next()
    assert batch.shape == (SIZES["tiny"].batch, SIZES["tiny"].context + 1)
    assert torch.equal(batch, again.next())
    assert not torch.equal(batch, other.next())


def test_measuring_the_held_out_loss_changes_nothing() -> None:
    model = ByteGPT(SIZES["tiny"])
    text = bytes(range(256)) * 4
    state = torch.random.get_rng_state()
    one = held_out_loss(model, text, SIZES["tiny"], 3)
    assert one == held_out_loss(model, text, SIZES["tiny"], 3)
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert max(rates) == 1.0 == rates[10]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
