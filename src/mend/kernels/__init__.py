"""kernels: what torch needs many passes for, compiled by numba, where numba is installed.

A kernel gives the bits of the torch code beside which it is used, and runs without the
interpreter's lock. It is compiled when it is first asked for: seconds, or less where numba finds in
its cache (`NUMBA_CACHE_DIR`, else beside the source, else that of the user) what it made before.
Whatever is wrong with the cache or with numba itself costs speed, never the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Made = TypeVar("_Made")


class BlockKernels(NamedTuple):
    """A codec of blocks. encode: fp32 (b, k) -> uint8 (b, c); decode: the way back. Both arrays are
    contiguous and the second one is written."""

    encode: Callable[[np.ndarray, np.ndarray], None]
    decode: Callable[[np.ndarray, np.ndarray], None]


_Product = Callable[[np.ndarray, np.ndarray, float, np.ndarray], None]


class ProductKernels(NamedTuple):
    """X is fp32 (m, n) and rounded to whole numbers once it is multiplied by the third argument, a
    power of two; the basis and what is written are float64, r rows of them. right: the transpose of
    X Q, of Q as rows (r, n); left: the transpose of X^T L, of L as rows (r, m). All are contiguous.
    The sums must be exact in float64."""

    right: _Product
    left: _Product


OFFER_TILE = 4096
"""Elements that a program of an `OfferKernel` is for: whole blocks of every codec."""

OfferKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
"""(delta, anchor, residual, left: fp32 N; payload: uint8 B; found: fp32 (4, G), G = N / OFFER_TILE
rounded up), all contiguous on one GPU; kernels.triton_offers says what is written. Runs on the
current stream."""


def offer_kernel(codec: str) -> OfferKernel:
    """Of the codec of this name: bfloat16, int8, int4 or e3m0. Compiled where it is first run on a
    device. Raises ImportError without Triton."""
    from mend.kernels import triton_offers

    return triton_offers.kernel(codec)


@cache
def _there() -> bool:
    """Whether numba can be used. Warns where it is installed and cannot."""
    if find_spec("numba") is None:
        return False
    return _unless_broken(lambda: import_module("numba")) is not None


def _unless_broken(made: Callable[[], _Made]) -> _Made | None:
    """None where numba fails, in whatever way, which is warned of."""
    try:
        return made()
    except Exception as error:  # with a numpy that it does not know, or a library that is damaged
        said = f"{type(error).__name__}: {error}"
        warnings.warn(f"codecs run without numba, slower: {said}", stacklevel=3)
        return None


@cache
def block_kernels(codec: str) -> BlockKernels | None:
    """Those of the codec of this name, int8, int4, e3m0 or topk; None without numba."""

    def made() -> BlockKernels:
        from mend.kernels import blocks

        return blocks.kernels(codec)

    return _unless_broken(made) if _there() else None


@cache
def product_kernels() -> ProductKernels | None:
    """None without numba."""

    def made() -> ProductKernels:
        from mend.kernels import products

        return products.kernels()

    return _unless_broken(made) if _there() else None


def compiled(signature: str, function: _Function, **options: Any) -> _Function:
    """For these types. Divisions by 0 give what the processor gives."""
    import numba

    options = {"nogil": True, "error_model": "numpy", **options}
    made: _Function
    try:
        made = numba.njit(signature, cache=True, **options)(function)
    except Exception:  # of the cache: no place that can be written to, a full disk, a damaged file
        made = numba.njit(signature, **options)(function)
    return made


def part(function: _Function) -> _Function:
    """Of kernels; compiled with the first of them, for the types that it is called with: rows of
    arrays, and single numbers."""
    import numba

    made: _Function = numba.njit(error_model="numpy")(function)
    return made


__all__ = [
    "OFFER_TILE",
    "BlockKernels",
    "OfferKernel",
    "ProductKernels",
    "block_kernels",
    "compiled",
    "offer_kernel",
    "part",
    "product_kernels",
]
