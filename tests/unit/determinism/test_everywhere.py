"""Level everywhere on this CPU has the bits that are pinned here, whichever CPU this is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._determinism_trainings import DIGESTS, TRAININGS, train
from mend.determinism import DeterministicTrainer, chains, chance, digest, enable, everywhere
from mend.determinism.gemm import by_definition
from mend.errors import NotDeterministic
from mend.kernels import elementary

LANES = 32


@pytest.fixture
def level() -> Iterator[None]:
    with enable(1, "everywhere"):
        yield


@pytest.mark.parametrize("name", TRAININGS)
def test_training_has_the_pinned_digest(name: str) -> None:
    assert train(name)[-1] == DIGESTS[name]


@pytest.mark.parametrize("microbatches", [2, 4])
def test_cut_training_has_the_pinned_digest(microbatches: int) -> None:
    assert train("llama", microbatches=microbatches)[-1] == DIGESTS["llama"]


def test_product_is_one_chain() -> None:
    generator = torch.Generator().manual_seed(3)
    for batch, rows, columns, pairs in ((1, 7, 17, 130), (2, 6, 16, 1), (1, 13, 5, 300)):
        a = torch.randn(batch, rows, pairs, generator=generator)
        b = torch.randn(batch, columns, pairs, generator=generator).transpose(1, 2)
        assert digest(chains.product(a, b)) == digest(by_definition(a, b) + 0.0)


def test_sum_of_a_row_is_chains_in_lanes_and_a_tree() -> None:
    x = np.random.default_rng(4).normal(size=(3, 2 * LANES + 5)).astype(np.float32)
    lanes = np.zeros((3, LANES), np.float32)
    for place in range(x.shape[1]):
        lanes[:, place % LANES] += x[:, place]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    assert np.array_equal(chains.row_sums(torch.from_numpy(x)).numpy(), lanes[:, 0])


ULPS: dict[str, tuple[Callable[[float], float], float]] = {
    "exp": (math.exp, 1.0), "log": (math.log, 1.0), "rsqrt": (lambda x: 1 / math.sqrt(x), 1.5),
    "root": (math.sqrt, 0.5), "sigmoid": (lambda x: 1 / (1 + math.exp(-x)), 2.6),
    "tanh": (math.tanh, 3.5), "erf": (math.erf, 1.1), "sin": (math.sin, 1.6),
    "cos": (math.cos, 1.6),
}  # fmt: skip
"""The function in float64, and how many units in the last place ours may be away."""


@pytest.mark.parametrize("name", ULPS)
def test_function_is_accurate(name: str) -> None:
    exact, most = ULPS[name]
    x = np.random.default_rng(5).normal(size=20_000) * np.repeat([0.01, 1, 8, 80], 5000)
    x = np.abs(x) if name in ("log", "rsqrt", "root") else x
    x32 = x.astype(np.float32)
    found = chains.apply(name, torch.from_numpy(x32)).numpy()
    expected = np.array([exact(float(each)) for each in x32])
    normal = (np.abs(expected) > 1.2e-38) & (np.abs(expected) < 3.4e38)
    found, expected = found[normal], expected[normal]
    away = np.abs(found - expected) / np.spacing(np.abs(expected).astype(np.float32))
    assert away.max() <= most


def test_functions_at_edges() -> None:
    edges = torch.tensor([0.0, math.inf, -math.inf, math.nan, 2.0**31])
    found = {name: chains.apply(name, edges).tolist() for name in elementary.UNARY}
    assert found["exp"][:3] == [1.0, math.inf, 0.0]
    assert found["log"][:2] == [-math.inf, math.inf]
    assert found["tanh"][:3] == [0.0, 1.0, -1.0]
    assert found["erf"][:3] == [0.0, 1.0, -1.0]
    assert math.isnan(found["log"][2])
    for name in elementary.UNARY:
        assert math.isnan(found[name][3]), name
    for name in ("sin", "cos"):  # the angle's own spacing is above a turn
        assert all(math.isnan(each) for each in found[name][1:]), name


@pytest.mark.usefixtures("level")
def test_torch_divides_correctly_here() -> None:
    x = torch.randn(10_007)
    for number in (3.0, 0.1, 7):
        exact = (x.double() / float(np.float32(number))).float()
        assert torch.equal(x / number, exact)
        assert torch.equal(x / torch.tensor(number), exact)
        assert torch.equal(x.clone().div_(number), exact)
    whole = torch.arange(9)
    assert torch.equal(whole / 2, torch.arange(9) * 0.5)
    assert (whole / 2).dtype == torch.float32
    halved = x.clone().requires_grad_()
    (halved / 2).sum().backward()
    assert torch.equal(halved.grad, torch.full_like(x, 0.5))


def test_whole_numbers_of_a_gpu_are_those_of_the_cpu() -> None:
    drawn = [torch.empty(50, dtype=torch.int64) for _ in range(2)]
    torch.manual_seed(4)
    chance.random_on_gpu(drawn[0], 3, 9)
    torch.manual_seed(4)
    drawn[1].random_(3, 9)
    assert torch.equal(*drawn)


@pytest.mark.usefixtures("level")
def test_gradients_are_those_of_the_functions() -> None:
    for name, function in {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "erf": torch.erf,
        "log softmax": lambda x: F.log_softmax(x, -1),
    }.items():
        x = torch.randn(5, 9).requires_grad_()
        weights = torch.randn(5, 9)
        (function(x) * weights).sum().backward()
        assert x.grad is not None
        step = 1e-2
        along = torch.randn(5, 9)
        with torch.no_grad():
            ahead, behind = function(x + step * along), function(x - step * along)
            numeric = ((ahead - behind) * weights).sum() / (2 * step)
            assert torch.allclose((x.grad * along).sum(), numeric, rtol=2e-2, atol=2e-3), name


@pytest.mark.usefixtures("level")
def test_random_numbers_have_their_distribution() -> None:
    uniform, normal = torch.rand(100_000), torch.randn(100_000)
    assert 0 <= uniform.min() < 1e-3
    assert 0.999 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.01
    assert torch.equal(torch.randperm(1000).sort().values, torch.arange(1000))
    assert not torch.equal(torch.rand(8), torch.rand(8))


def test_random_numbers_repeat() -> None:
    def draw() -> str:
        with enable(9, "everywhere"):
            return digest([nn.Linear(5, 3).weight, torch.randn(3), torch.randperm(9)])

    assert draw() == draw()


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "aten.lerp.Scalar": lambda x: x.lerp(x, 0.1),
    "aten.addcmul.default": lambda x: x.addcmul(x, x, value=0.3),
    "aten.add.Tensor": lambda x: x.add(x, alpha=0.3),
    "aten.pow.Tensor_Scalar": lambda x: x**2.5,
    "aten.softplus.default": F.softplus,
    "aten.sort.default": torch.sort,
    "aten.arange.start_step": lambda x: torch.arange(0, 1, 0.1),
    "aten.linspace.default": lambda x: torch.linspace(0, 1, 7),
    "exp of torch.float64": lambda x: x.double().exp(),
    "a matrix product of torch.bfloat16": lambda x: x.bfloat16() @ x.bfloat16().t(),
    "aten.exp.out": lambda x: torch.exp(x, out=torch.empty_like(x)),
}


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", REFUSED)
def test_undefined_operation_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotDeterministic) as caught:
        REFUSED[name](torch.randn(4, 4))
    assert name in str(caught.value)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda weights: torch.optim.Adamax(weights), "Adamax"),
        (lambda weights: torch.optim.SGD(weights, 0.1, 0.9, nesterov=True), "nesterov"),
        (lambda weights: torch.optim.AdamW(weights, amsgrad=True), "amsgrad"),
    ],
)
def test_optimizer_that_is_not_defined_is_refused(
    make: Callable[[object], torch.optim.Optimizer], name: str
) -> None:
    model = nn.Linear(3, 2)
    trainer = DeterministicTrainer(model, make(model.parameters()), 1, level="everywhere")
    with pytest.raises(NotDeterministic, match=name):
        trainer.step(torch.randn(4, 3), lambda model, x: model(x).sum())


OPTIMIZERS: dict[str, Callable[[object], torch.optim.Optimizer]] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.2),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.1, weight_decay=0.2),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_that_of_torch_but_for_rounding_and_calls_hooks(name: str) -> None:
    weights, states, called = [], [], []
    for level in ("run", "everywhere"):
        torch.manual_seed(2)
        model = nn.Linear(6, 5)
        x = torch.randn(8, 6)
        with enable(1, level):  # type: ignore[arg-type]
            optimizer = OPTIMIZERS[name](model.parameters())
            optimizer.register_step_post_hook(lambda *_: called.append(1))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            trainer = DeterministicTrainer(
                model, optimizer, 1, level=level, scheduler=schedule  # type: ignore[arg-type]
            )  # fmt: skip
            for _ in range(5):
                trainer.step(x, lambda model, x: (model(x) * x[:, :5]).sum())
        weights.append(model.weight.detach())
        states.append({name: set(state) for name, state in optimizer.state_dict()["state"].items()})
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-5)
    assert states[0] == states[1]
    assert len(called) == 10


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [("has_fma", lambda: False, "fused multiply-add"), ("find_spec", lambda name: None, "numba")],
)
def test_machine_without_fma_or_numba_is_refused(
    name: str, missing: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everywhere, name, missing)
    with pytest.raises(NotDeterministic, match=said):
        enable(1, "everywhere")


def test_flushed_denormals_are_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    try:
        with pytest.raises(NotDeterministic, match="denormal"):
            enable(1, "everywhere")
    finally:
        torch.set_flush_denormal(False)


def test_torchs_own_kernels_come_back() -> None:
    x = torch.randn(1000)
    before = x.exp(), torch.nn.functional.silu(x)
    with enable(1, "everywhere"):
        assert not torch.equal(x.tanh(), torch.tensor(np.tanh(x.double().numpy())))
    assert torch.equal(x.exp(), before[0])
    assert torch.equal(torch.nn.functional.silu(x), before[1])


@pytest.mark.usefixtures("level")
def test_norms_of_the_exchange_are_in_fp64() -> None:
    x = torch.randn(1000)
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    assert norm.dtype == torch.float64
    assert abs(float(norm) - math.sqrt(math.fsum(float(each) ** 2 for each in x))) < 1e-12
