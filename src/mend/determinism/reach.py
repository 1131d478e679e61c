"""Registers the functions of this room as aten's operators for the CPU, through torch.library, so
that modules, F.* and all other code use them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from mend.determinism import attention, every_device, kernels, linear, norms
from mend.determinism.autocasting import LAYERS, under_autocast
from mend.determinism.coverage import unwatched
from mend.determinism.gpu_reach import put_on_gpu
from mend.determinism.laws import broken_laws
from mend.errors import NotDeterministic

WITH_GRADIENTS: dict[str, Callable[..., Any]] = {
    **every_device.WITH_GRADIENTS,
    "linear": linear.linear,
    "matmul": linear.matmul,
    "mm": linear.mm,
    "addmm": linear.addmm,
    "scaled_dot_product_attention": attention.scaled_dot_product_attention,
    "rms_norm": norms.rms_norm,
}
"""As in every_device.py."""

BELOW: dict[str, Callable[..., Any]] = {
    **every_device.BELOW,
    "bmm": kernels.bmm,
    "baddbmm": kernels.baddbmm,
    "_softmax": kernels.softmax,
    "_softmax_backward_data": kernels.softmax_backward,
    "_log_softmax": kernels.log_softmax,
    "_log_softmax_backward_data": kernels.log_softmax_backward,
    "rsqrt": kernels.rsqrt,
    "rsqrt_": kernels.rsqrt_,
    "pow.Tensor_Scalar": kernels.power,
    "pow_.Scalar": kernels.power_,
    "sigmoid": kernels.sigmoid,
    "silu": kernels.silu,
    "silu_backward": kernels.silu_backward,
    "gelu": kernels.gelu,
    "gelu_backward": kernels.gelu_backward,
    "native_layer_norm": kernels.layer_norm,
    "native_layer_norm_backward": kernels.layer_norm_backward,
    "embedding_dense_backward": kernels.embedding_backward,
    "index_add": kernels.index_add,
    "index_add_": kernels.index_add_,
    "scatter_add": kernels.scatter_add,
    "scatter_add_": kernels.scatter_add_,
    "index_put": kernels.index_put,
}

REACHED = frozenset(WITH_GRADIENTS) | frozenset(BELOW)


def put_in_place(leaf_rows: int) -> tuple[Callable[[], None], dict[str, str]]:
    """Register all of them for this process, and those of gpu_reach.py. Returns a function that
    removes them, and settings to list.

    Raises NotDeterministic where torch's elementwise kernels do not keep what this rests on.
    """
    if broken := broken_laws():
        raise NotDeterministic(
            f"bits of {', '.join(broken)} depend on the place of the element on this machine",
            "use level run, or another build of torch",
        )
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: that it overrides its own kernels
        for name, function in WITH_GRADIENTS.items():
            library.impl(name, function, "AutogradCPU")
            library.impl(name, function, "CPU")
        for name in LAYERS:
            library.impl(name, under_autocast(WITH_GRADIENTS[name], "cpu"), "AutocastCPU")
        for name, function in BELOW.items():
            library.impl(name, unwatched(function), "CPU")
        restore_blas, settings = put_on_gpu(library, REACHED, leaf_rows)
    restore_attention = refuse_old_attention()

    def take_away() -> None:
        restore_attention()
        restore_blas()
        library._destroy()

    return take_away, settings


def refuse_old_attention() -> Callable[[], None]:
    """Returns a function that restores it."""
    attention_of_old = functional.multi_head_attention_forward
    functional.multi_head_attention_forward = _refuse_attention_of_old

    def restore() -> None:
        functional.multi_head_attention_forward = attention_of_old

    return restore


def _refuse_attention_of_old(*args: Any, **kwargs: Any) -> Any:
    """In place of the function that nn.MultiheadAttention and nn.Transformer call: it moves the
    batch to the second dimension before it multiplies by weights."""
    raise NotDeterministic(
        "nn.MultiheadAttention is not reached at level shape: its linear layers do not have the "
        "batch as their first dimension",
        "use F.scaled_dot_product_attention",
    )
