"""kernels.self_checks: compares what a kernel writes with what numpy computes, on some rows.
Touches arrays only.

A kernel is machine code that may come from a file that another process wrote. If it is not what its
name says, racks agree on wrong weights. So before it uses them, each process checks the kernels
that all weights go through.

Legend: N elements, M payloads, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mend.kernels import ROW_NUMEL, ApplyKernel, MergeKernel, OfferKernel, block_kernels

_F32 = np.float32
_NUMEL, _MEMBERS, _LIMIT = 2 * ROW_NUMEL, 3, 1e9


def _noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(_NUMEL, _F32)


def _compare(found_N: np.ndarray, expected_N: np.ndarray, what: str) -> None:
    if not np.array_equal(found_N.view(np.uint8), expected_N.view(np.uint8)):
        raise RuntimeError(
            f"the compiled {what} computes something else, and is not used. Its file in numba's "
            "cache is damaged or of another function: remove NUMBA_CACHE_DIR, or __pycache__ of "
            "mend/kernels"
        )


def _ways(codec: str) -> tuple[Callable[[np.ndarray], np.ndarray], ...]:
    """fp32 N -> uint8 B, and the inverse."""
    if codec == "float32":
        return lambda x_N: x_N.view(np.uint8), lambda payload_B: payload_B.view(_F32)
    kernels = block_kernels(codec)
    if kernels is None:
        raise RuntimeError(f"the blocks of {codec} have no kernel")
    from mend.kernels.blocks import PARTS  # loads numba

    _, _, block, block_bytes = PARTS[codec]
    blocks = _NUMEL // block

    def encode(x_N: np.ndarray) -> np.ndarray:
        rows_bc = np.empty((blocks, block_bytes), np.uint8)
        kernels.encode(x_N.reshape(blocks, block), rows_bc)
        return rows_bc.reshape(-1)

    def decode(payload_B: np.ndarray) -> np.ndarray:
        out_bk = np.empty((blocks, block), _F32)
        kernels.decode(payload_B.reshape(blocks, block_bytes), out_bk)
        return out_bk.reshape(-1)

    return encode, decode


def check_merge(kernel: MergeKernel, codec: str) -> MergeKernel:
    """Return the kernel. Raises RuntimeError where its outer step of a mean has other bits."""
    encode, decode = _ways(codec)
    payloads = [encode(_noise(seed)) for seed in range(_MEMBERS)]
    weights, anchor_N, state_N = np.array([[0.5, 0.25, 0.125]]), _noise(10), _noise(11)
    decay, share, stretch, momentum, lr = 0.75, 0.5, 1.5, 0.875, 0.625
    out_N, after_N = np.empty(_NUMEL, _F32), np.empty(_NUMEL, _F32)
    kernel(
        np.array([each.ctypes.data for each in payloads], np.uint64), 0,
        np.array([_NUMEL]), weights, anchor_N, state_N, decay, share, stretch, momentum, lr,
        _LIMIT, out_N, after_N, np.empty((2, 0, 8), np.uint64),
    )  # fmt: skip
    sum_N = np.zeros(_NUMEL)
    for payload_B, weight in zip(payloads, weights[0], strict=True):
        sum_N = sum_N + decode(payload_B) * weight
    delta_N = sum_N.astype(_F32)
    expected_N = state_N * decay + delta_N * share
    _compare(after_N, expected_N, f"merge of {codec}")
    _compare(
        out_N, anchor_N - (delta_N * stretch + expected_N * momentum) * lr, f"merge of {codec}"
    )
    return kernel


def check_offer(kernel: OfferKernel, codec: str) -> OfferKernel:
    """Return the kernel. Raises RuntimeError where its payload or residual have other bits."""
    encode, decode = _ways(codec)
    rows = (_NUMEL // ROW_NUMEL, ROW_NUMEL)
    snapshot_N, residual_N, anchor_N = (_noise(seed) for seed in range(3))
    x_N = (anchor_N - snapshot_N) + residual_N
    payload_B = encode(x_N)
    found_B, x_rk, squares = np.empty_like(payload_B), np.empty(rows, _F32), np.empty((2, 2), _F32)
    delta_rk = snapshot_N.reshape(rows).copy()
    kernel(
        delta_rk, residual_N.reshape(rows), anchor_N.reshape(rows), x_rk, _LIMIT,
        found_B.reshape(rows[0], -1), x_rk, False, squares,
    )  # fmt: skip
    _compare(delta_rk.reshape(-1), anchor_N - snapshot_N, f"offer of {codec}")
    _compare(found_B, payload_B, f"offer of {codec}")
    _compare(x_rk.reshape(-1), x_N - decode(payload_B), f"offer of {codec}")
    return kernel


def check_apply(kernel: ApplyKernel) -> ApplyKernel:
    """Return the kernel. Raises RuntimeError where its apply of a named offer has other bits."""
    theta_N, anchor_N, delta_N, next_N = (_noise(seed) for seed in range(4))
    expected_N = next_N + (theta_N - (anchor_N - delta_N))
    kernel(theta_N, anchor_N, delta_N, next_N, False, 0.0)
    _compare(theta_N, expected_N, "apply")
    return kernel
