"""How layers are cut over GPUs: real ranks on the CPU, where a chain of additions in Python stands
for the kernels. What the kernels make of it: tests/gpu/test_determinism_ranks.py."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mend.determinism import digest, gpu_parallel, gpu_products, rows
from mend.determinism.collectives import Gathered, own_share
from mend.determinism.digests import same_bits
from mend.determinism.gpu_parallel import CutLinear, OwnRows
from mend.determinism.gpu_products import linear
from mend.determinism.tensor_parallel import Cut
from mend.determinism.trees import tree_sum
from mend.errors import NotDeterministic

ROWS, TOKENS, INPUTS, OUTPUTS = 3, 4, 32, 64


def chain(a_ZMK: Tensor, b_ZKN: Tensor) -> Tensor:
    """(Z, M, N): one addition after another over K."""
    total = a_ZMK.new_zeros(*a_ZMK.shape[:2], b_ZKN.shape[2])
    for k in range(a_ZMK.shape[2]):
        total = total + a_ZMK[:, :, k, None] * b_ZKN[:, k, None, :]
    return total


KERNELS = SimpleNamespace(
    products=chain,
    LEAVES_MAX=2,
    tree=lambda nodes, out: out.copy_(tree_sum(nodes, 0)),
    column_sums=lambda x_LTD: chain(torch.ones(len(x_LTD), 1, x_LTD.shape[1]), x_LTD)[:, 0],
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_products, "_kernels", lambda: KERNELS)
    gpu_products.set_products(True, 1)
    yield
    gpu_products.set_products(False, 0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def on_ranks(ranks: int, folder: Path, function: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What every one of so many forked ranks found."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        try:
            torch.set_num_threads(1)  # the parent's threads are not here
            meeting = f"file://{folder}/meeting"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
            found = function()
        except BaseException:
            found = {"fault": traceback.format_exc()}
        try:
            (folder / f"{rank}.json").write_text(json.dumps(found))
        finally:
            os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(each == said[0] for each in said), said
    first: dict[str, str] = said[0]
    return first


def digests(out: Tensor, *gradients: Tensor) -> dict[str, str]:
    names = ("output", "input", "weight", "bias")
    return {
        name: digest(each.detach()) for name, each in zip(names, (out, *gradients), strict=True)
    }


def share(x: Tensor, dim: int, fused: int = 1) -> Tensor:
    """This rank's, of each of so many layers."""
    pieces = x.chunk(fused, dim)
    return torch.cat([own_share(each.contiguous(), None, dim) for each in pieces], dim)


def whole(x: Tensor, dim: int, fused: int = 1) -> Tensor:
    """The inverse of share()."""
    pieces = (Gathered.apply(each, None, dim) for each in x.detach().chunk(fused, dim))  # type: ignore[no-untyped-call]
    return torch.cat(list(pieces), dim)


def uncut() -> dict[str, str]:
    x, weight, bias, grad = tensors()
    with rows(0, ROWS):
        out = linear(x, weight, bias)
        return digests(out, *torch.autograd.grad(out, (x, weight, bias), grad))


def tensors() -> tuple[Tensor, ...]:
    x, weight, bias = drawn(ROWS, TOKENS, INPUTS), drawn(OUTPUTS, INPUTS), drawn(OUTPUTS)
    return (*(each.requires_grad_() for each in (x, weight, bias)), drawn(ROWS, TOKENS, OUTPUTS))


def cut_layer(sums_in: bool, fused: int, tokens_cut: bool) -> dict[str, str]:
    x, weight, bias, grad = (each.detach() for each in tensors())
    cut = Cut(0, 0, dist.group.WORLD, sums_in, fused, tokens_cut)
    if sums_in:
        x, weight = share(x, 2), share(weight, 1)
        grad = share(grad, 1) if tokens_cut else grad
    else:
        weight, bias, grad = (share(each, -1 if each is grad else 0, fused)
                              for each in (weight, bias, grad))  # fmt: skip
        x = share(x, 1) if tokens_cut else x
    for each in (x, weight, bias):
        each.requires_grad_()
    with rows(0, ROWS):
        out: Any = CutLinear.apply(x, weight, bias, cut)
        dx, dw, db = torch.autograd.grad(out, (x, weight, bias), grad)
    if sums_in:
        out = whole(out, 1) if tokens_cut else out
        return digests(out, whole(dx, 2), whole(dw, 1), db)
    dx = whole(dx, 1) if tokens_cut else dx
    return digests(whole(out, 2, fused), dx, whole(dw, 0, fused), whole(db, 0, fused))


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_cut_over_ranks_have_the_bits_of_whole_ones(tmp_path: Path, ranks: int) -> None:
    """4 ranks cannot share 3 rows evenly, but their 12 tokens; and 2 ranks as well."""
    cases = [(True, 1, False), (True, 1, True), (False, 1, False), (False, 1, True),
             (False, 2, False), (False, 2, True)]  # fmt: skip

    def made() -> dict[str, str]:
        found = {str(case): cut_layer(*case) for case in cases}
        return {
            f"{case} {name}": value for case, all in found.items() for name, value in all.items()
        }

    expected = uncut()
    found = on_ranks(ranks, tmp_path, made)
    assert "fault" not in found, found["fault"]
    assert {
        key for key, value in found.items() if value != expected[key.rsplit(" ", 1)[1]]
    } == set()


def cut_as_usual(tokens_cut: bool) -> dict[str, str]:
    """Of a row-parallel layer the output, of a column-parallel one the gradient of its input: each
    rank computes a part of every sum, and the parts are added."""
    x, weight, _, grad = (each.detach() for each in tensors())
    parts = {
        "output": chain(share(x, 2), share(weight, 1).t()[None].expand(ROWS, -1, -1)),
        "input": chain(share(grad, 2), share(weight, 0)[None].expand(ROWS, -1, -1)),
    }
    if not tokens_cut:
        for part in parts.values():
            dist.all_reduce(part)
        return {name: digest(part) for name, part in parts.items()}
    found = {}
    for name, part in parts.items():
        mine = torch.empty_like(share(part, 1))
        pieces = [each.contiguous() for each in part.chunk(dist.get_world_size(), 1)]
        dist.reduce_scatter(mine, pieces)
        found[name] = digest(whole(mine, 1))
    return found


@pytest.mark.parametrize("tokens_cut", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_cut_as_usual_have_other_bits(tmp_path: Path, ranks: int, tokens_cut: bool) -> None:
    """So the test above would fail if the layers were cut so."""
    expected = uncut()
    found = on_ranks(ranks, tmp_path, lambda: cut_as_usual(tokens_cut))
    assert "fault" not in found, found["fault"]
    assert all(found[name] != expected[name] for name in ("output", "input"))


def test_words_cut_over_ranks_come_whole_for_a_share_of_the_rows(tmp_path: Path) -> None:
    """5 rows for 2 ranks: one of zeros behind them."""
    logits, grad = drawn(5, 16), drawn(6, 16)

    def made() -> dict[str, str]:
        mine = share(logits, 1).requires_grad_()
        here: Any = OwnRows.apply(mine, None)
        (dx,) = torch.autograd.grad(here, mine, share(grad, 0))
        return {"rows": digest(whole(here, 0)), "gradient": digest(whole(dx, 1))}

    padded = torch.cat([logits, torch.zeros(1, 16)])
    expected = {"rows": digest(padded), "gradient": digest(grad[:5].clone())}
    assert on_ranks(2, tmp_path, made) == expected


def test_weights_in_bf16_and_a_gpu_without_kernels_are_refused() -> None:
    x, weight = drawn(1, 2, 8), drawn(8, 8)
    cut: Any = None
    with pytest.raises(NotDeterministic, match=r"weights in torch\.bfloat16"):
        CutLinear.apply(x, weight.bfloat16(), None, cut)
    gpu_products.set_products(False, 0)
    with pytest.raises(NotDeterministic, match="no kernels on this GPU"):
        CutLinear.apply(x, weight, None, cut)


def test_pairs_are_those_of_own_tokens_with_one_rank(mesh: Any) -> None:
    x = drawn(2, 3, 8)
    group = mesh.get_group()
    assert torch.equal(gpu_parallel.pairs_of_own_tokens(x, group), x)
    assert torch.equal(gpu_parallel.tokens_of_own_pairs(x, group), x)


@pytest.mark.parametrize("leaves", [0, 16, 300])
def test_gradient_of_a_weight_from_many_leaves_is_made_within_the_limit(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without tokens, (rows, features), has as many leaves as rows."""
    a, b, made = drawn(leaves, 1, 200), drawn(leaves, 1, 8), list[int]()

    def products(a_ZMK: Tensor, b_ZKN: Tensor) -> Tensor:
        part = chain(a_ZMK, b_ZKN)
        made.append(4 * part.numel())
        return part

    monkeypatch.setattr(KERNELS, "products", products)
    monkeypatch.setattr(gpu_products, "BYTES_MAX", 1 << 16)
    found = gpu_products.outer_product(a, b, torch.bfloat16)
    assert same_bits(found, tree_sum(chain(a.transpose(1, 2), b), 0).bfloat16())
    assert max(made, default=0) <= 1 << 16
