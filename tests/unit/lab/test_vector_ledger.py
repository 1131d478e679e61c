"""The ledger closes when nothing is lost or doubled, and says how much when something is."""

from __future__ import annotations

import pytest
import torch

from mend_lab.sim.vector_ledger import VectorLedger


def vec(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_round_by_hand() -> None:
    """Moved by 3 (down to theta = -3), offer y = 2 of x = 3, residual 1; moved 1 more; merged into
    an anchor at -5."""
    ledger, A, theta = VectorLedger(1), vec(0.0), vec(-3.0)
    ledger.moved(vec(0.0), theta)
    assert ledger.error(theta, A, None) == 0
    ledger.captured(vec(2.0))
    assert ledger.error(theta, A, None) == 0, "pending: A - theta still holds it"
    ledger.moved(vec(-3.0), vec(-4.0))
    ledger.named()
    new = vec(-5.0)
    carried = new + (vec(-4.0) - vec(-3.0))
    assert ledger.error(carried, new, vec(1.0)) == 0
    assert ledger.error(carried, new, None) == pytest.approx(1 / 4), "the residual is forgotten"


def test_a_dropped_offer_sent_nothing() -> None:
    ledger = VectorLedger(1)
    ledger.moved(vec(0.0), vec(-1.0))
    ledger.captured(vec(1.0))
    ledger.dropped()
    assert ledger.error(vec(-1.0), vec(0.0), None) == 0
    ledger.captured(vec(1.0))
    ledger.named()
    assert ledger.error(vec(7.0), vec(7.0), None) == 0


def test_an_offer_may_be_told_when_it_is_named() -> None:
    ledger = VectorLedger(1)
    ledger.moved(vec(0.0), vec(-1.0))
    ledger.named(vec(1.0))
    assert ledger.error(vec(0.0), vec(0.0), None) == 0


def test_counting_twice_is_a_number() -> None:
    ledger = VectorLedger(2)
    ledger.moved(vec(0.0, 0.0), vec(-1.0, 0.0))
    ledger.named(vec(1.0, 0.0))
    assert ledger.error(vec(-1.0, 0.0), vec(0.0, 0.0), None) == 1


def test_before_any_step_there_is_no_error() -> None:
    assert VectorLedger(3).error(torch.ones(3), torch.ones(3), None) == 0


def test_two_open_offers_or_none_are_bugs() -> None:
    ledger = VectorLedger(1)
    with pytest.raises(AssertionError):
        ledger.named()
    ledger.captured(vec(1.0))
    with pytest.raises(AssertionError):
        ledger.captured(vec(1.0))
