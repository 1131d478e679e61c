"""What has no order of mend's is refused by name, or listed; at the end all is put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mend.determinism import DeterministicTrainer, enable, laws, reach, rows
from mend.determinism.clipping import clip_grad_norm
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


COMPLEX: dict[str, Callable[[Tensor], object]] = {
    "mul": lambda z: z * z,
    "div": lambda z: z / z,
    "sum": lambda z: z.sum(),
    "mean": lambda z: z.mean(-1),
    "var": lambda z: z.var(),
    "linalg_vector_norm": torch.linalg.vector_norm,
    "_foreach_norm": lambda z: torch._foreach_norm([z, z]),
    "view_as_complex": lambda z: torch.view_as_complex(torch.view_as_real(z)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_refused_by_name(name: str) -> None:
    """A norm of them was NaN, and a product's bits depended on the place."""
    z = torch.complex(X, X)
    with enable(1, "shape"), pytest.raises(NotDeterministic, match=rf"{name}\..*real numbers"):
        COMPLEX[name](z)


def test_clipping_of_complex_gradients_is_refused() -> None:
    weight = nn.Parameter(torch.complex(X, X))
    weight.grad = torch.complex(X, X)
    with enable(1, "shape"), pytest.raises(NotDeterministic, match="a norm of complex numbers"):
        clip_grad_norm([weight], 1.0)
    with enable(1, "shape"), pytest.raises(NotDeterministic, match=r"norm.*real numbers"):
        nn.utils.get_total_norm([weight.grad])


def test_counts_with_weights_are_refused() -> None:
    words = torch.tensor([0, 1, 1])
    with enable(1, "shape"):
        assert words.bincount().tolist() == [1, 2]
        assert words.bincount(words).tolist() == [0, 2]
        with pytest.raises(NotDeterministic, match="bincount"):
            words.bincount(torch.tensor([0.1, 0.2, 0.3]))


SHARDED: dict[str, Callable[[Tensor], object]] = {
    "linalg_vector_norm": torch.linalg.vector_norm,
    "_foreach_norm": lambda x: nn.utils.get_total_norm([x], foreach=True),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "var": lambda x: x.var(),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sums_of_shards_are_refused_by_name(mesh: DeviceMesh, name: str) -> None:
    """DTensors add them up below the watch."""
    cut = DTensor.from_local(X[0], mesh, [Shard(0)])
    with enable(1, "shape"):
        SHARDED[name](DTensor.from_local(X[0], mesh, [Replicate()]))
        (cut + cut).mul_(2)
        with pytest.raises(NotDeterministic, match=rf"{name}\..*clip_grad_norm for"):
            SHARDED[name](cut)


def test_clipping_of_shards_is_not_refused(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(DTensor.from_local(X[0], mesh, [Shard(0)]))
    weight.grad = DTensor.from_local(X[0].clone(), mesh, [Shard(0)])
    with enable(1, "shape"):
        total = clip_grad_norm([weight], 1.0)
        assert same_bits(total, torch.linalg.vector_norm(X[0]))
        with pytest.raises(NotDeterministic, match="norm"):
            nn.utils.clip_grad_norm_([weight], 1.0)
