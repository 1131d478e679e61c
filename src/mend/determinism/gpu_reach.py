"""Registers the kernels of level shape for CUDA, or says by name what they lack."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from mend.determinism import every_device, gpu_layers, gpu_products
from mend.determinism.autocasting import LAYERS, under_autocast
from mend.determinism.coverage import unwatched
from mend.determinism.laws import broken_laws
from mend.determinism.trees import set_row_kernel
from mend.errors import NotDeterministic

WITH_GRADIENTS: dict[str, Callable[..., Any]] = {
    **every_device.WITH_GRADIENTS,
    "linear": gpu_products.linear,
    "matmul": gpu_products.matmul,
    "mm": gpu_products.mm,
    "addmm": gpu_products.addmm,
    "scaled_dot_product_attention": gpu_layers.scaled_dot_product_attention,
    "rms_norm": gpu_layers.rms_norm,
    "layer_norm": gpu_layers.layer_norm,
    "cross_entropy_loss": gpu_layers.cross_entropy,
}
"""As in every_device.py."""

BELOW: dict[str, Callable[..., Any]] = {
    **every_device.BELOW,
    "bmm": gpu_products.bmm,
    "baddbmm": gpu_products.baddbmm,
    "var.correction": gpu_layers.variance,
    "std.correction": gpu_layers.deviation,
}

TORCHS_OWN = frozenset(
    (
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "rsqrt",
        "rsqrt_",
        "pow.Tensor_Scalar",
        "pow_.Scalar",
        "sigmoid",
        "silu",
        "silu_backward",
        "gelu",
        "gelu_backward",
    )
)
"""Row by row or element by element: a row's bits were equal in every batch measured."""


def put_on_gpu(
    library: Any, reached: frozenset[str], leaf_rows: int
) -> tuple[Callable[[], None], dict[str, str]]:
    """Returns a function that restores torch's switches, and settings to list. Where something is
    missing, every operator refuses with its name instead."""
    if not torch.cuda.is_available():
        _refuse(library, reached, "a GPU that torch can use")
        return lambda: None, {}
    with torch.cuda.device(_device()):
        if missing := _missing():
            _refuse(library, reached, missing)
            return lambda: None, {"kernels on CUDA": f"none: level shape there needs {missing}"}
        restore = gpu_products.pin_blas()
        by_blas = gpu_products.keeps_law(torch.device("cuda", torch.cuda.current_device()))
    gpu_products.set_products(not by_blas, leaf_rows)
    set_row_kernel(gpu_products._kernels().row_trees)
    _register(library, reached)
    products = "cuBLASLt without split-K" if by_blas else "one fixed tile"

    def take_away() -> None:
        gpu_products.set_products(False, 0)
        set_row_kernel(None)
        restore()

    return take_away, {
        "kernels on CUDA": f"of mend.determinism; products by {products}",
        "leaf_rows": str(leaf_rows),
    }


def _missing() -> str | None:
    if missing := gpu_products.missing_requirement():
        return missing
    device = torch.device("cuda", torch.cuda.current_device())
    if broken := broken_laws(device):
        return f"elementwise kernels that do not depend on the place; {', '.join(broken)} do"
    return None


def _device() -> int:
    """The one that this process will use: enable() often comes before set_device()."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.current_device()
    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def _register(library: Any, reached: frozenset[str]) -> None:
    for name, function in WITH_GRADIENTS.items():
        library.impl(name, function, "AutogradCUDA")
        library.impl(name, function, "CUDA")
    for name in LAYERS:
        library.impl(name, under_autocast(WITH_GRADIENTS[name], "cuda"), "AutocastCUDA")
    for name, function in BELOW.items():
        library.impl(name, unwatched(function), "CUDA")
    for name in reached - frozenset(WITH_GRADIENTS) - frozenset(BELOW) - TORCHS_OWN:
        library.impl(name, _refusal(name, "another operator"), "CUDA")


def _refuse(library: Any, reached: frozenset[str], missing: str) -> None:
    for name in reached:
        library.impl(name, _refusal(name, missing), "CUDA")


def _refusal(name: str, missing: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotDeterministic(
            f"{name} on a GPU is not reached at level shape: it needs {missing}",
            "train on the CPU, or use level run",
        )

    return refuse
