"""What has no order of mend's is refused by name, or listed; at the end all is put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mend.determinism import DeterministicTrainer, enable, laws, reach, rows
from mend.determinism.digests import same_bits
from mend.determinism.enabling import Level
from mend.determinism.laws import broken_laws, keeps
from mend.errors import NotDeterministic
from tests.unit.determinism.llama import WORDS, Llama, loss_of

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))

REFUSED = {
    "convolution": lambda: F.conv1d(X, torch.ones(4, 3, 3)),
    "batch_norm": lambda: F.batch_norm(X, torch.zeros(3), torch.ones(3), training=True),
    "cumsum": lambda: X.cumsum(-1),
    "softplus": lambda: F.softplus(X),
    "pow": lambda: X.abs().pow(1.7),
    "bernoulli": lambda: X.sigmoid().bernoulli(),
    "prod": lambda: X.prod(-1),
    "logsumexp": lambda: X.logsumexp(-1),
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(8, 2)(X, X, X),
    "scatter_.value_reduce": lambda: X.clone().scatter_(
        0, torch.zeros_like(X, dtype=torch.long), 0.1, reduce="add"
    ),
    "index_put_": lambda: X.clone().index_put_((torch.tensor([0, 0]),), X, accumulate=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operator_that_is_not_covered_is_refused_by_name_or_listed(name: str) -> None:
    with enable(1, "shape"), pytest.raises(NotDeterministic, match=name):
        REFUSED[name]()
    if name == "nn.MultiheadAttention":
        return  # refused either way: its weights would get gradients in the wrong order
    with enable(1, "shape", strict=False) as state:
        REFUSED[name]()
        assert any(name in each for each in state.unreached), state.unreached


def test_a_whole_model_trains_with_nothing_unreached() -> None:
    with enable(1, "shape") as state:
        model = Llama(dropout=0.1, groups=2)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, torch.randint(0, WORDS, (2, 9))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert state.unreached == {}


def test_everything_is_put_back() -> None:
    x = torch.randn(64, 100)
    before = x.sum(1), F.silu(x), x @ x.t()
    with enable(1, "shape"):
        inside = x.sum(1), F.silu(x), x @ x.t()
    for one, other, between in zip(before, (x.sum(1), F.silu(x), x @ x.t()), inside, strict=True):
        assert same_bits(one, other)
        assert torch.allclose(one, between, atol=1e-4)
    assert not same_bits(before[0], inside[0]), "torch's order: the test would see nothing"
    F.conv1d(X, torch.ones(4, 3, 3))
    nn.MultiheadAttention(8, 2)(X, X, X)


def test_integers_and_exact_reductions_pass() -> None:
    with enable(1, "shape"):
        assert torch.arange(9).cumsum(0)[-1] == 36
        assert X.amax() == X.max()


def test_a_kernel_whose_bits_depend_on_the_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own silu on most processors: the tail is computed otherwise than the body."""

    def by_vectors(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        body = len(x) // 16 * 16
        return torch.cat([x[:body] * y[:body] * z[:body], x[body:] * (y[body:] * z[body:])])

    assert broken_laws() == ()
    assert not keeps(by_vectors)
    monkeypatch.setattr(reach, "broken_laws", lambda: ("exp",))
    with pytest.raises(NotDeterministic, match="bits of exp depend"):
        enable(1, "shape")
    assert laws.keeps(lambda x, y, z: x + y)
    with enable(1):
        pass


def test_a_subclass_is_refused() -> None:
    class Mine(Tensor):
        pass

    with enable(1, "shape"), pytest.raises(NotDeterministic, match="linear of a Mine"):
        F.linear(X.as_subclass(Mine), torch.ones(4, 8))


DRAWS: dict[str, Callable[[], Tensor]] = {
    "randn": lambda: torch.randn(2, 3),
    "rand": lambda: torch.rand(2),
    "randint": lambda: torch.randint(0, 9, (2,)),
    "randperm": lambda: torch.randperm(3),
    "normal_": lambda: torch.empty(2).normal_(),
    "random_": lambda: torch.empty(2, dtype=torch.long).random_(),
    "normal.float_float": lambda: torch.normal(0.0, 1.0, (2,)),
}


@pytest.mark.parametrize("level", ["shape", "everywhere"])
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_drawn_inside_of_a_model_are_refused_by_name(name: str, level: Level) -> None:
    """Each part of a batch begins with the same seed and drew the same noise."""
    if level == "everywhere":
        pytest.importorskip("numba")
    with enable(1, level), DeterministicTrainer(*made(), 1, level=level) as trainer:
        DRAWS[name]()  # weights and data
        trainer.step(X, lambda model, x: model(x).mean() * torch.rand(()))
        with pytest.raises(NotDeterministic, match=rf"aten\.{name}.*draw for the whole batch"):
            trainer.step(X, lambda model, x: model(x).mean() + DRAWS[name]().sum())
        with rows(0, 2), pytest.raises(NotDeterministic, match=name):
            DRAWS[name]()
        with rows(0, 2):
            torch.rand(2, generator=torch.Generator().manual_seed(1))  # data, in one's own loop
        DRAWS[name]()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 2), nn.Dropout(0.5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
