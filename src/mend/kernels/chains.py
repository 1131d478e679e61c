"""kernels.chains: products, sums of rows and elementary functions for a CPU, whose bits are defined
and not the processor's. Touches arrays only.

An element of a product is one chain of fused multiply-adds in fp32 over K, ascending, that begins
with 0; 0 is added at the end. A sum of a row is LANES chains of additions, element i in lane i %
LANES, and a tree of halves over the lanes. Vectors of the processor hold neighbouring columns, or
lanes: no order depends on their width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import binding

from mend.kernels import compiled, elementary, part
from mend.kernels.elementary import fma

LANES = 32

_COLUMNS = 256
"""Of a tile, whose sums stay in the cache closest to the core."""


def has_fma() -> bool:
    """Whether this processor has the instruction; without, a library would emulate it."""
    features = binding.get_host_cpu_features()
    return bool(features.get("fma", False)) or not binding.get_process_triple().startswith("x86")


@part
def _eight(a_8: Any, b_8N: Any, c_N: Any) -> None:
    """Eight links of the chain of every column."""
    a0, a1, a2, a3, a4, a5, a6, a7 = a_8
    for n in range(c_N.shape[0]):
        s = fma(a1, b_8N[1, n], fma(a0, b_8N[0, n], c_N[n]))
        s = fma(a3, b_8N[3, n], fma(a2, b_8N[2, n], s))
        s = fma(a5, b_8N[5, n], fma(a4, b_8N[4, n], s))
        c_N[n] = fma(a7, b_8N[7, n], fma(a6, b_8N[6, n], s))


def product(a_ZMK: Any, b_ZKN: Any, c_ZMN: Any) -> None:
    """c = a @ b; c is written."""
    batch, rows, pairs = a_ZMK.shape
    columns = b_ZKN.shape[2]
    whole = pairs - pairs % 8
    for z in range(batch):
        for first in range(0, columns, _COLUMNS):
            last = min(first + _COLUMNS, columns)
            for m in range(rows):
                a, c = a_ZMK[z, m], c_ZMN[z, m, first:last]
                c[:] = np.float32(0)
                for k in range(0, whole, 8):
                    eight = (
                        a[k],
                        a[k + 1],
                        a[k + 2],
                        a[k + 3],
                        a[k + 4],
                        a[k + 5],
                        a[k + 6],
                        a[k + 7],
                    )
                    _eight(eight, b_ZKN[z, k : k + 8, first:last], c)
                for k in range(whole, pairs):
                    b = b_ZKN[z, k, first:last]
                    for n in range(c.shape[0]):
                        c[n] = fma(a[k], b[n], c[n])
                for n in range(c.shape[0]):
                    c[n] = c[n] + np.float32(0)


def row_sums(x_ND: Any, out_N: Any) -> None:
    """The sum of every row; `out_N` is written."""
    features = x_ND.shape[1]
    whole = features - features % LANES
    lanes = np.zeros(LANES, np.float32)
    for row in range(x_ND.shape[0]):
        x = x_ND[row]
        lanes[:] = np.float32(0)
        for first in range(0, whole, LANES):
            for lane in range(LANES):
                lanes[lane] += x[first + lane]
        for lane in range(features - whole):
            lanes[lane] += x[whole + lane]
        half = LANES // 2
        while half:
            for lane in range(half):
                lanes[lane] += lanes[lane + half]
            half //= 2
        out_N[row] = lanes[0]


@cache
def kernel(name: str) -> Callable[..., None]:
    """ "product", "row_sums", or a function of `elementary` as (arguments, out): flat fp32."""
    if name == "product":
        return compiled("void(f4[:,:,::1], f4[:,:,::1], f4[:,:,::1])", product)
    if name == "row_sums":
        return compiled("void(f4[:,::1], f4[::1])", row_sums)
    function = getattr(elementary, name)
    if name in elementary.UNARY:

        def unary(x_N: Any, out_N: Any) -> None:
            for n in range(out_N.shape[0]):
                out_N[n] = function(x_N[n])

        return _made("void(f4[::1], f4[::1])", unary)

    def binary(x_N: Any, y_N: Any, out_N: Any) -> None:
        for n in range(out_N.shape[0]):
            out_N[n] = function(x_N[n], y_N[n])

    return _made("void(f4[::1], f4[::1], f4[::1])", binary)


def _made(signature: str, function: Callable[..., None]) -> Callable[..., None]:
    """Compiled anew in every process: numba's cache does not see which function is called."""
    made: Callable[..., None] = numba.njit(signature, nogil=True, error_model="numpy")(function)
    return made
