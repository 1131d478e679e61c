"""Operators whose order is composed of others, so that a CPU and a GPU have one table of them. The
trees add alike on both; what they are made of is registered by reach.py and gpu_reach.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mend.determinism import chance, embeddings, kernels

WITH_GRADIENTS: dict[str, Callable[..., Any]] = {
    "dropout": chance.dropout,
    "embedding": embeddings.embedding,
}
"""Differentiated by what they are made of. They see the batch as the module gave it."""

BELOW: dict[str, Callable[..., Any]] = {
    "sum": kernels.sum_all,
    "sum.dim_IntList": kernels.sum_dims,
    "mean": kernels.mean_all,
    "mean.dim": kernels.mean_dims,
    "var.correction": kernels.variance,
    "std.correction": kernels.deviation,
    "linalg_vector_norm": kernels.vector_norm,
    "_foreach_norm.Scalar": kernels.foreach_norm,
    "dot": kernels.dot,
    "nll_loss_forward": kernels.nll_loss,
    "mse_loss": kernels.mse_loss,
    "mse_loss_backward": kernels.mse_loss_backward,
}
"""Below autograd: torch's own formulas of gradients call them."""
