"""Level shape on a GPU: a batch gives equal bits however it is cut, and what has no order is
refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._determinism_models import Gpt, Llama, loss_in_bf16, loss_of
from mend.determinism import (
    DeterministicTrainer,
    elementwise,
    enable,
    rows,
    sequences,
    weight_digest,
)
from mend.determinism import gpu_products as products
from mend.determinism import kernels as passes
from mend.determinism.trees import tree_sum
from mend.errors import NotDeterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SEED, ROWS, TOKENS, WORDS = 7, 8, 100, 512
TOKENS_EXACT = 128
"""With a power of two also the losses are equal: means over parts are exact."""
CUTS = (1, 2, 4, 8)
Loss = Callable[[nn.Module, Tensor], Tensor]


def gpt(dropout: float = 0.0) -> nn.Module:
    return Gpt(WORDS, 128, 2, 2, TOKENS_EXACT, dropout)


def llama(heads: int = 4, **more: Any) -> nn.Module:
    return Llama(WORDS, 256, 2, heads, 2, 512, **more)


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with enable(SEED, level="shape"):
        yield


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def batches(steps: int = 3, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, WORDS, (steps, ROWS, tokens + 1), generator=generator)
    drawn[:, :, ::7] = 11  # a word that is everywhere
    return drawn.cuda()


def trained(
    make: Callable[[], nn.Module], loss: Loss, microbatches: int, *,
    dtype: torch.dtype = torch.float32, level: Any = "shape", clip: float | None = 0.5,
    leaf_rows: int = 1, fused: bool = True, tokens: int = TOKENS, steps: int = 3,
    cuda_graph: bool = False, why_not: str | None = None,
) -> tuple[str, list[float]]:  # fmt: skip
    with enable(SEED, level=level, leaf_rows=leaf_rows):
        torch.manual_seed(0)
        model = make().to("cuda", dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level=level, microbatches=microbatches, grad_norm_max=clip,
            cuda_graph=cuda_graph,
        )  # fmt: skip
        losses = [trainer.step(batch, loss).item() for batch in batches(steps, tokens)]
        if (graphs := trainer._graphs) is not None:
            assert graphs.why_not is why_not is None or why_not in str(graphs.why_not)
            assert why_not or all(plan.is_trusted for plan in graphs._plans.values())
        return trainer.digest(), losses


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Any]]] = {
    "GPT, autocast, tied": (gpt, loss_in_bf16, {}),
    "GPT, dropout": (lambda: gpt(0.1), loss_in_bf16, {}),
    "Llama, autocast": (llama, loss_in_bf16, {}),
    "Llama, heads of 128": (lambda: llama(2), loss_in_bf16, {"fused": False}),
    "Llama, weights in bf16": (llama, loss_of, {"dtype": torch.bfloat16}),
    "Llama, fp32": (llama, loss_of, {}),
    "Llama, compiled functions": (partial(llama, fused=True), loss_in_bf16, {}),
    "Llama, compiled functions, weights in bf16": (
        partial(llama, fused=True),
        loss_of,
        {"dtype": torch.bfloat16},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_of_the_batch_gives_equal_bits(name: str) -> None:
    make, loss, more = CASES[name]
    found = {cut: trained(make, loss, cut, **more) for cut in CUTS}
    assert len({digest for digest, _ in found.values()}) == 1, found
    losses = found[1][1]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", [gpt, llama])
def test_the_losses_of_every_cut_are_equal_where_their_means_are_exact(make: Any) -> None:
    found = {str(trained(make, loss_in_bf16, cut, tokens=TOKENS_EXACT)) for cut in CUTS}
    assert len(found) == 1


def test_without_the_level_the_cuts_differ() -> None:
    found = {trained(llama, loss_in_bf16, cut, level="run")[0] for cut in CUTS}
    assert len(found) > 1


def test_checkpointing_changes_nothing() -> None:
    def checkpointed() -> nn.Module:
        return llama(dropout=0.1, checkpointed=True)

    expected, _ = trained(lambda: llama(dropout=0.1), loss_in_bf16, 1)
    assert trained(checkpointed, loss_in_bf16, 2)[0] == expected


def test_leaves_of_two_rows_give_equal_bits_in_other_cuts_and_other_bits_than_of_one() -> None:
    found = {trained(llama, loss_in_bf16, cut, leaf_rows=2)[0] for cut in (1, 2, 4)}
    assert len(found) == 1
    assert found != {trained(llama, loss_in_bf16, 1)[0]}


def test_a_microbatch_below_a_leaf_is_refused() -> None:
    with pytest.raises(NotDeterministic, match="a microbatch of 1 rows in leaves of 2 rows"):
        trained(llama, loss_in_bf16, 8, leaf_rows=2)


def test_the_fixed_tile_has_the_bits_of_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(llama, loss_in_bf16, 2)
    monkeypatch.setattr(products, "keeps_law", lambda device: False)
    assert trained(llama, loss_in_bf16, 2) == expected


def test_this_gpu_keeps_the_law(shape: None) -> None:
    assert products.keeps_law(torch.device("cuda", torch.cuda.current_device()))


def test_losses_are_those_of_plain_torch() -> None:
    _, losses = trained(gpt, loss_in_bf16, 1)
    _, plain = trained(gpt, loss_in_bf16, 1, level="run")
    assert losses == pytest.approx(plain, rel=5e-3)


def test_compiled_function_computes_under_autocast_as_torch_does(shape: None) -> None:
    def softened(x: Tensor, y: Tensor) -> Tensor:  # autocast computes exp and pow in fp32
        return (x.exp() * y).pow(2)

    x, y = (torch.randn(64, 32, device="cuda").bfloat16().requires_grad_() for _ in range(2))

    def results(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            made = function(x, y)
        return [made, *torch.autograd.grad(made, (x, y), torch.ones_like(made))]

    for ours, expected in zip(results(elementwise(softened)), results(softened), strict=True):
        assert ours.dtype == expected.dtype
        assert torch.allclose(ours, expected, rtol=1e-2)


def test_compiled_functions_have_the_losses_of_torch() -> None:
    _, losses = trained(partial(llama, fused=True), loss_in_bf16, 1)
    assert losses == pytest.approx(trained(llama, loss_in_bf16, 1)[1], rel=5e-3)


def test_packed_sequences_have_the_gradients_of_padded_ones() -> None:
    lengths = (100, 33, 64, 7)
    words = batches(1)[0, : len(lengths)]
    packed = torch.cat([row[:length] for row, length in zip(words, lengths, strict=True)])[None]
    target = torch.cat([row[1 : length + 1] for row, length in zip(words, lengths, strict=True)])[
        None
    ]
    padded = torch.stack(
        [
            torch.cat([row[1 : length + 1], row.new_full((TOKENS - length,), -100)])
            for row, length in zip(words, lengths, strict=True)
        ]
    )
    place = torch.cat([torch.arange(length) for length in lengths]).cuda()

    def digest(inside: AbstractContextManager[None], words: Tensor, target: Tensor, at: Any) -> str:
        torch.manual_seed(0)
        model = llama().cuda()
        with enable(SEED, level="shape"), inside:
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(words, at)
                loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            (loss / 256).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        return weight_digest(model)

    one = digest(sequences(lengths), packed, target, place)
    other = digest(rows(0, len(lengths)), words[:, :TOKENS], padded, None)
    assert one == other


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "name", ["GPT, dropout", "Llama, weights in bf16", "Llama, fp32", "Llama, compiled functions"]
)
def test_cuda_graphs_change_no_bits(name: str, microbatches: int) -> None:
    make, loss, more = CASES[name]
    expected = trained(make, loss, microbatches, steps=6, **more)
    assert trained(make, loss, microbatches, steps=6, cuda_graph=True, **more) == expected


class Waits:
    """Waits for the GPU, which a graph cannot."""

    def __call__(self, model: nn.Module, words_BT: Tensor) -> Tensor:
        loss = loss_in_bf16(model, words_BT)
        return loss * (1 if loss.item() > 0 else 2)


class Draws:
    """A number that Python draws in every step, which a graph would repeat."""

    def __call__(self, model: nn.Module, words_BT: Tensor) -> Tensor:
        return loss_in_bf16(model, words_BT) * (1 + torch.rand(()).item())


@pytest.mark.parametrize(("make_loss", "why"), [(Waits, "captur"), (Draws, "has other bits")])
def test_loss_that_a_cuda_graph_cannot_repeat_runs_without_graph(make_loss: Any, why: str) -> None:
    expected = trained(llama, make_loss(), 1, steps=5)
    found = trained(llama, make_loss(), 1, steps=5, cuda_graph=True, why_not=why)
    assert found == expected


def close(one: Tensor, other: Tensor, error: float) -> bool:
    return bool((one.double() - other.double()).norm() <= error * other.double().norm())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "features"),
    [(torch.bfloat16, 48), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 48)],
)
def test_attention_is_right_and_does_not_depend_on_the_batch(
    dtype: torch.dtype, features: int, is_causal: bool
) -> None:
    torch.manual_seed(3)
    q = torch.randn(3, 4, 200, features, device="cuda").to(dtype).requires_grad_()
    k, v = (torch.randn(3, 2, 200, features, device="cuda").to(dtype) for _ in range(2))
    k.requires_grad_()
    v.requires_grad_()
    grad = torch.randn(3, 4, 200, features, device="cuda").to(dtype)

    def attend(*args: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*args, is_causal=is_causal, enable_gqa=True)

    with enable(SEED, level="shape"):
        out = attend(q, k, v)
        made = torch.autograd.grad(out, (q, k, v), grad)
        alone = [x[1:2].detach().requires_grad_() for x in (q, k, v)]
        out_alone = attend(*alone)
        made_alone = torch.autograd.grad(out_alone, alone, grad[1:2])
    assert torch.equal(out_alone, out[1:2])
    assert all(torch.equal(x, y[1:2]) for x, y in zip(made_alone, made, strict=True))
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    weights = exact[0] @ exact[1].repeat_interleave(2, 1).transpose(2, 3) / features**0.5
    if is_causal:
        weights = weights.masked_fill(torch.ones(200, 200).triu(1).bool(), float("-inf"))
    expected = weights.softmax(-1) @ exact[2].repeat_interleave(2, 1)
    error = 1e-5 if dtype == torch.float32 else 1e-2
    assert close(out.cpu(), expected, error)
    for x, y in zip(made, torch.autograd.grad(expected, exact, grad.cpu().double()), strict=True):
        assert close(x.cpu(), y, error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    for outputs, inputs in ((768, 3072), (129, 640), (64, 4096)):
        x = torch.randn(300, inputs, device="cuda").to(dtype)
        weight = torch.randn(outputs, inputs, device="cuda").to(dtype)
        bias = torch.randn(outputs, device="cuda").to(dtype)
        with enable(SEED, level="shape"):
            whole = F.linear(x, weight, bias)
            for count in (1, 2, 3, 17, 64, 100):
                assert torch.equal(F.linear(x[:count], weight, bias), whole[:count])
        assert close(whole, x.double() @ weight.double().t() + bias.double(), 1e-2)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norms_and_their_gradients_are_right(norm: Any) -> None:
    x = torch.randn(4, 70, 384, device="cuda", requires_grad=True)
    weight = torch.randn(384, device="cuda", requires_grad=True)
    grad = torch.randn(4, 70, 384, device="cuda")
    with enable(SEED, level="shape"):
        out = norm(x, (384,), weight)
        made = torch.autograd.grad(out, (x, weight), grad)
    there = [each.detach().cpu().double().requires_grad_() for each in (x, weight)]
    away = there[0] - (there[0].sum(-1, True) / 384 if norm is F.layer_norm else 0)
    small = 1e-5 if norm is F.layer_norm else torch.finfo(torch.float32).eps
    expected = away / ((away * away).sum(-1, True) / 384 + small).sqrt() * there[1]
    assert close(out.cpu(), expected, 1e-5)
    for one, other in zip(
        made, torch.autograd.grad(expected, there, grad.cpu().double()), strict=True
    ):
        assert close(one.cpu(), other, 1e-5)


def refused() -> dict[str, Callable[[], Any]]:
    x = torch.randn(2, 4, 64, 64, device="cuda", requires_grad=True)
    flat = torch.randn(8, 64, device="cuda", requires_grad=True)
    return {
        "convolution": lambda: F.conv2d(x, torch.randn(3, 4, 3, 3, device="cuda")),
        "cumsum": lambda: flat.cumsum(0),
        "attention with a mask": lambda: F.scaled_dot_product_attention(
            x, x, x, torch.ones(64, 64, device="cuda", dtype=torch.bool)
        ),
        "attention with dropout": lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        "attention of 192 features": lambda: F.scaled_dot_product_attention(
            *[torch.randn(1, 2, 64, 192, device="cuda")] * 3
        ),
        "index_add on a GPU": lambda: flat.detach().index_add(
            0, torch.zeros(8, dtype=torch.long, device="cuda"), flat
        ),
        "index_put": lambda: flat[torch.zeros(3, dtype=torch.long, device="cuda")].sum().backward(),
        "matrix product of torch.float64": lambda: flat.double() @ flat.double().t(),
        "label smoothing": lambda: F.cross_entropy(
            flat, torch.zeros(8, dtype=torch.long, device="cuda"), label_smoothing=0.1
        ),
        "sparse embedding": lambda: F.embedding(
            torch.zeros(3, dtype=torch.long, device="cuda"), flat, sparse=True
        ),
    }


@pytest.mark.parametrize("what", [
    "convolution", "cumsum", "attention with a mask", "attention with dropout",
    "attention of 192 features", "index_add on a GPU", "index_put",
    "matrix product of torch.float64", "label smoothing", "sparse embedding",
])  # fmt: skip
def test_operation_without_a_fixed_order_is_refused_by_name(shape: None, what: str) -> None:
    with pytest.raises(NotDeterministic, match=what):
        refused()[what]()


def test_sums_do_not_depend_on_the_rows(shape: None) -> None:
    x = torch.randn(64, 1000, device="cuda")
    for function in (
        lambda x: x.sum(-1), lambda x: x.mean(-1), lambda x: x.var(-1),
        lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: x.softmax(-1),
    ):  # fmt: skip
        assert torch.equal(function(x[:3]), function(x)[:3])


@pytest.mark.parametrize("features", [1, 64, 1000, 4096, 12000, 20000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_variances_over_features_have_the_bits_of_their_definition(
    shape: None, dtype: torch.dtype, features: int
) -> None:
    x = torch.randn(37, features, device="cuda").add(3).to(dtype)
    for correction in (0, 1, 0.3):
        for ours, definition in ((torch.var, passes.variance), (torch.std, passes.deviation)):
            expected = definition(x, [-1], correction=correction, keepdim=True)
            found = ours(x, -1, correction=correction, keepdim=True)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("leaves", [1, 2, 8])
def test_the_gradient_of_a_weight_in_bf16_is_the_tree_rounded_once(
    shape: None, leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(leaves, 128, 256, device="cuda").bfloat16()
    weight = torch.randn(1024, 256, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(leaves, 128, 1024, device="cuda").bfloat16()

    def gradient() -> Tensor:
        with rows(0, leaves):
            return torch.autograd.grad(F.linear(x, weight), weight, grad)[0]

    chains = products._tiles(grad.transpose(1, 2), x)
    expected = tree_sum(chains, 0).bfloat16()
    assert torch.equal(gradient(), expected)
    monkeypatch.setattr(products, "BYTES_MAX", 4 * leaves * 256 * 384)
    assert torch.equal(gradient(), expected)


def test_settings_name_the_kernels_and_close_restores_the_switches() -> None:
    backend: Any = torch.backends.cuda.matmul
    before = backend.allow_bf16_reduced_precision_reduction_split_k
    with enable(SEED, level="shape") as state:
        assert "cuBLASLt without split-K" in state.settings["kernels on CUDA"]
        assert not backend.allow_bf16_reduced_precision_reduction_split_k
    assert backend.allow_bf16_reduced_precision_reduction_split_k == before
