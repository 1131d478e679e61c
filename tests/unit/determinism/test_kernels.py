"""Each kernel is right, forward and backward, and gives a row the same bits in any company.

Right: values as the formula in fp64, gradients as slopes. In any company: alone,
among others, strided, on one thread or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mend.determinism import enable, sequences
from mend.determinism.digests import same_bits
from mend.determinism.kernels import sum_by_place
from mend.determinism.trees import tree_sum

Op = Callable[[Tensor], Tensor]
WIDTH, ROWS = 37, 12

OPS: dict[str, Op] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)) % WIDTH, reduction="none"),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), torch.linspace(0.5, 2, WIDTH)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), torch.linspace(0.5, 2, WIDTH), eps=1e-6),
    "sigmoid": lambda x: x.sigmoid(),
    "silu": F.silu,
    "swiglu": lambda x: F.silu(x) * x.roll(1, -1),
    "gelu": F.gelu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "mse_loss": lambda x: F.mse_loss(
        x, torch.linspace(-1, 1, WIDTH).expand_as(x), reduction="none"
    ),
    "mse_loss of rows": lambda x: torch.stack([F.mse_loss(y, y.flip(0)) for y in x]),
    "l1_loss": lambda x: F.l1_loss(x, torch.linspace(-1, 1, WIDTH).expand_as(x), reduction="none"),
    "max": lambda x: x.max(-1).values,
    "min": lambda x: x.min(-1).values,
    "dot": lambda x: torch.stack([row.dot(row) for row in x]),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "linear": lambda x: F.linear(x, torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)),
    "mm": lambda x: torch.mm(x, torch.linspace(-1, 1, 5 * WIDTH).view(WIDTH, 5)),
    "addmm": lambda x: torch.addmm(x[:, :1], x, torch.linspace(-1, 1, 5 * WIDTH).view(WIDTH, 5)),
    "matmul": lambda x: x @ torch.linspace(-1, 1, 5 * WIDTH).view(WIDTH, 5),
    "matvec": lambda x: x @ torch.linspace(-1, 1, WIDTH),
    "bmm": lambda x: x[:, None] @ x[:, :, None],
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(-1, 1, WIDTH, 1),) * 3),
}

ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())


@pytest.fixture(scope="module", autouse=True)
def shape_level() -> Iterator[None]:
    threads = torch.get_num_threads()
    with enable(1, "shape"):
        yield
    torch.set_num_threads(threads)


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def both(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of its product with fixed noise per row."""
    leaf = x.detach().clone().requires_grad_()
    out = op(leaf)
    weight = noise(ROWS, out[0].numel(), seed=9)[: len(x)].view(out.shape)
    (out * weight).sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@ops
def test_a_row_does_not_depend_on_the_others(op: Op) -> None:
    x = noise(ROWS, WIDTH)
    out, grad = both(op, x)
    for rows in (1, 2, 7):
        some, some_grad = both(op, x[:rows])
        assert same_bits(some, out[:rows])
        assert same_bits(some_grad, grad[:rows])
    strided = torch.empty(ROWS, WIDTH, 2)[:, :, 0].copy_(x)
    assert same_bits(op(strided), out)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert same_bits(both(op, x)[1], grad)


@ops
def test_gradients_are_the_slopes(op: Op) -> None:
    x = noise(3, WIDTH)
    _, grad = both(op, x)
    step, weight = 1e-2, noise(ROWS, op(x)[0].numel(), seed=9)[:3]
    for column in (0, 17, 36):
        moved = torch.zeros_like(x)
        moved[:, column] = step
        change = (op(x + moved) - op(x - moved)).view(3, -1) / (2 * step)
        expected = (change * weight).sum(-1)
        assert torch.allclose(grad[:, column], expected, rtol=0.05, atol=0.02)


PLAIN: dict[str, tuple[Op, Callable[[Tensor], Tensor]]] = {
    "softmax": (OPS["softmax"], lambda x: (p := (x - x.amax(-1, True)).exp()) / by_fsum(p)),
    "mean": (OPS["mean"], lambda x: by_fsum(x)[:, 0] / WIDTH),
    "var": (OPS["var"], lambda x: by_fsum((x - by_fsum(x) / WIDTH) ** 2)[:, 0] / (WIDTH - 1)),
    "std": (
        OPS["std"],
        lambda x: (by_fsum((x - by_fsum(x) / WIDTH) ** 2)[:, 0] / (WIDTH - 1)).sqrt(),
    ),
    "mse_loss of rows": (
        OPS["mse_loss of rows"],
        lambda x: by_fsum((x - x.flip(1)) ** 2)[:, 0] / WIDTH,
    ),
    "rms_norm": (
        OPS["rms_norm"],
        lambda x: x / (by_fsum(x * x) / WIDTH + 1e-6).sqrt() * torch.linspace(0.5, 2, WIDTH),
    ),
    "silu": (F.silu, lambda x: x * torch.special.expit(x)),
    "gelu": (F.gelu, lambda x: x * torch.special.ndtr(x)),
}


def by_fsum(x: Tensor) -> Tensor:
    return torch.tensor([[math.fsum(row)] for row in x.tolist()], dtype=x.dtype)


@pytest.fixture
def lenient() -> Iterator[None]:
    """Formulas of the tests may use what mend does not reach."""
    with _disable_current_modes():
        yield


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.usefixtures("lenient")
def test_values_are_those_of_the_formula(name: str) -> None:
    op, formula = PLAIN[name]
    x = noise(4, WIDTH)
    assert torch.allclose(op(x).double(), formula(x.double()), rtol=1e-5, atol=1e-6)


def test_gradients_of_weights_are_trees_over_the_batch() -> None:
    """A norm and an embedding: halves of the batch add up to the bits of the whole."""
    torch.manual_seed(2)
    norms = [nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 3), nn.Embedding(5, 16)]
    for module in norms:
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(0, 5, (8, 6), generator=generator)
        inputs = words if isinstance(module, nn.Embedding) else noise(8, 6, 16)
        gradients = []
        for rows in (slice(0, 8), slice(0, 4), slice(4, 8)):
            module.zero_grad()
            out = module(inputs[rows])
            (out * noise(8, *out.shape[1:], seed=3)[rows]).sum().backward()
            gradients.append([each.grad.clone() for each in module.parameters()])  # type: ignore[union-attr]
        for whole, one, other in zip(*gradients, strict=True):
            assert same_bits(whole, one + other), type(module).__name__


def test_an_embedding_counts_every_word() -> None:
    words = torch.tensor([[1, 1, 2], [0, 1, 3]])
    weight = noise(4, 2).requires_grad_()
    grad = noise(2, 3, 2, seed=8)
    F.embedding(words, weight, padding_idx=3).backward(grad)
    assert weight.grad is not None
    expected = torch.stack(
        [grad[1, 0], (grad[0, 0] + grad[0, 1]) + grad[1, 1], grad[0, 2], torch.zeros(2)]
    )
    assert same_bits(weight.grad, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64])
def test_sums_by_place_are_trees(count: int) -> None:
    x, row = noise(count, 3), torch.arange(count) % 2
    found = sum_by_place(x, row, torch.arange(count), 3)
    for number in (0, 1, 2):
        sparse = torch.where((row == number)[:, None], x, 0.0)
        assert same_bits(found[number], tree_sum(sparse, 0))


def test_scatters_and_indexing() -> None:
    x, index = noise(3, 4), torch.tensor([2, 0, 2, 2, 1])
    source = noise(5, 4, seed=6)
    added = x.index_add(0, index, source)
    assert same_bits(added[2], x[2] + (source[0] + (source[2] + source[3])))
    assert same_bits(x.clone().index_add_(0, index, source), added)
    spread = index[:, None].expand(5, 4)
    assert same_bits(x.scatter_add(0, spread, source), added)
    assert same_bits(x.clone().scatter_add_(0, spread, source), added)
    leaf = x.clone().requires_grad_()
    leaf[index].backward(source)
    assert leaf.grad is not None
    assert same_bits(leaf.grad, torch.zeros(3, 4).index_add(0, index, source))


def test_an_index_outside_is_refused() -> None:
    """As torch refuses it. scatter_add() added to the next row, and index_add() to the end."""
    for place in (-1, 3):
        with pytest.raises(IndexError, match="out of range"):
            torch.zeros(3).index_add_(0, torch.tensor([place]), torch.ones(1))
        with pytest.raises(IndexError, match="out of range"):
            torch.zeros(2, 3).scatter_add_(1, torch.tensor([[place]]), torch.ones(1, 1))


def test_empty_tensors_give_the_results_of_torch() -> None:
    """A rank that got no rows, or a parameter without elements, ended with an IndexError."""
    assert torch.linalg.vector_norm(torch.zeros(0)).item() == 0
    assert torch.linalg.vector_norm(torch.tensor(-3.0)).item() == 3
    logits = noise(0, 5).requires_grad_()
    loss = F.cross_entropy(logits, torch.zeros(0, dtype=torch.int64), reduction="sum")
    loss.backward()
    assert loss.item() == 0
    words = noise(5, 4).requires_grad_()
    F.embedding(torch.zeros(0, 3, dtype=torch.int64), words).sum().backward()
    assert words.grad is not None
    assert not words.grad.any()


def test_addmm_with_beta_0_reads_nothing_of_what_is_there() -> None:
    """It is often memory that nobody wrote, which torch fills with NaN at this level."""
    a, b, there = noise(3, 4), noise(4, 5), torch.full((3, 5), torch.nan)
    assert same_bits(torch.addmm(there, a, b, beta=0), a @ b)


def test_integers_are_summed_as_ever() -> None:
    index, ones = torch.tensor([1, 1, 2]), torch.ones(3, dtype=torch.int64)
    assert torch.zeros_like(ones).index_add_(0, index, ones, alpha=2).tolist() == [0, 4, 2]
    assert torch.zeros_like(ones).scatter_add_(0, index, ones).tolist() == [0, 2, 1]
    x = torch.arange(12).view(3, 4)
    assert x.sum().item() == 66
    assert x.sum(1).tolist() == [6, 22, 38]
    assert (x > 4).sum().item() == 7


def test_cross_entropy_that_ignores_words() -> None:
    x, target = noise(6, 5), torch.tensor([0, 1, -100, 3, -100, 2])
    kept = target >= 0
    found = F.cross_entropy(x, target)
    each = -x[kept].log_softmax(-1).gather(1, target[kept][:, None])
    assert torch.allclose(found, each.mean())
    assert same_bits(F.cross_entropy(x, target, reduction="none")[2], torch.tensor(0.0))


def test_packed_sequences_have_the_norms_gradient_of_padded_ones() -> None:
    module, lengths = nn.RMSNorm(8), [3, 5, 1]
    x, grad = noise(9, 8), noise(9, 8, seed=3)
    with sequences(lengths):
        module(x[None]).backward(grad[None])
    packed = module.weight.grad.clone()  # type: ignore[union-attr]
    padded, padded_grad = torch.zeros(3, 5, 8), torch.zeros(3, 5, 8)
    for row, (part, part_grad) in enumerate(
        zip(x.split(lengths), grad.split(lengths), strict=True)
    ):
        padded[row, : len(part)], padded_grad[row, : len(part)] = part, part_grad
    module.zero_grad()
    module(padded).backward(padded_grad)
    assert same_bits(packed, module.weight.grad)  # type: ignore[arg-type]
