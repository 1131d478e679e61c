"""What level shape needs on a GPU is named; nothing here needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mend.determinism import enable, gpu_products, gpu_reach
from mend.determinism.embeddings import embedding
from mend.determinism.gpu_layers import _attend, cross_entropy
from mend.determinism.reach import REACHED
from mend.errors import ConfigError, NotDeterministic


class Library:
    """Notes what is registered."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, str], Callable[..., Any]] = {}

    def impl(self, name: str, function: Callable[..., Any], key: str) -> None:
        self.kernels[name, key] = function


def refusal(library: Library, name: str) -> str:
    with pytest.raises(NotDeterministic) as refused:
        library.kernels[name, "CUDA"]()
    return str(refused.value)


def test_without_a_gpu_every_operator_refuses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    library = Library()
    _, settings = gpu_reach.put_on_gpu(library, REACHED, 1)
    assert settings == {}
    assert library.kernels.keys() == {(name, "CUDA") for name in REACHED}
    assert "linear on a GPU is not reached at level shape: it needs a GPU" in refusal(
        library, "linear"
    )


def test_a_torch_without_the_switches_is_refused_with_the_least_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_products, "SPLIT_K", ("allow_tf32", "allow_tf32"))
    missing = gpu_products.missing_requirement()
    assert missing is not None
    assert missing.startswith(f"torch {gpu_products.TORCH_MIN} or newer")


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    missing = gpu_products.missing_requirement()
    assert missing is not None
    assert "compute capability 9.0 or newer; this has 8.6" in missing


def test_operation_without_a_gpu_kernel_is_refused_by_name() -> None:
    library = Library()
    gpu_reach._register(library, REACHED)
    for name in ("index_add", "scatter_add", "index_put", "native_layer_norm"):
        assert f"{name} on a GPU is not reached" in refusal(library, name)
    mine = {*gpu_reach.WITH_GRADIENTS, *gpu_reach.BELOW, *gpu_reach.TORCHS_OWN}
    refused = REACHED - mine
    assert {name for name, key in library.kernels if key == "CUDA"} == (
        refused | set(gpu_reach.WITH_GRADIENTS) | set(gpu_reach.BELOW)
    )


def test_attention_without_an_order_is_refused() -> None:
    x = torch.zeros(1, 2, 8, 64)
    for args, what in (
        ((x, x, x, x, 0.0, False, None, False), "with a mask"),
        ((x, x, x, None, 0.1, False, None, False), "with dropout"),
        ((*[torch.zeros(1, 2, 8, 192)] * 3, None, 0.0, True, None, False), "of 192 features"),
        ((x, x[:, :, :4], x[:, :, :4], None, 0.0, True, None, False), "whose queries, keys"),
    ):
        with pytest.raises(NotDeterministic, match=what):
            _attend(*args)


def test_losses_and_embeddings_without_an_order_are_refused() -> None:
    x, target = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
    for more in ({"label_smoothing": 0.1}, {"weight": torch.ones(4)}):
        with pytest.raises(NotDeterministic, match="label smoothing"):
            cross_entropy(x, target, **more)  # type: ignore[arg-type]
    with pytest.raises(NotDeterministic, match="sparse embedding"):
        embedding(x, target, sparse=True)


@pytest.mark.parametrize("leaf_rows", [0, 3, -2])
def test_leaves_of_no_power_of_two_rows_are_refused(leaf_rows: int) -> None:
    with pytest.raises(ConfigError, match="leaf_rows"):
        enable(3, level="shape", leaf_rows=leaf_rows)
