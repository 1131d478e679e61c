"""Compiled forms of code that takes torch many passes: by numba, where it is installed, and for a
GPU by Triton (`device_offer_kernel`).

A kernel gives the bits of the torch code beside which it is used, and runs without the
interpreter's lock. numba compiles it on first use. This takes seconds, or less if the kernel is in
numba's cache (`NUMBA_CACHE_DIR`, else beside the source, else that of the user). A fault of the
cache or of numba costs speed, never the run: kernels that weights go through are checked before
they are used (`self_checks`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


class BlockKernels(NamedTuple):
    """A codec of blocks. encode: fp32 (b, k) -> uint8 (b, c); decode: the way back. Both arrays are
    contiguous and the second one is written."""

    encode: Callable[[np.ndarray, np.ndarray], None]
    decode: Callable[[np.ndarray, np.ndarray], None]


ROW_NUMEL = 4096
"""Elements that a kernel of offers reads at once: they stay in the cache closest to the core. It is
a multiple of the block of every compiled codec."""

_Vector = np.ndarray
DeltaKernel = Callable[[_Vector, _Vector, _Vector, _Vector, float], float]
"""(delta, residual, anchor, x: fp32 (r, ROW_NUMEL), contiguous; a limit) -> the greatest magnitude
in x. NaN, Inf, or a magnitude that reaches the limit ends the work with its row.

With an anchor, `delta` is a snapshot and becomes anchor - snapshot; without one, `anchor` has no
rows. x becomes delta + residual; without a residual, `residual` has no rows and x is delta."""

SquaresKernel = Callable[[_Vector, _Vector], None]
"""(x: fp32 (r, ROW_NUMEL), contiguous; squares: fp32 r, which is written): the sum of the squares
of each row, as a tree of halves."""

OfferKernel = Callable[
    [_Vector, _Vector, _Vector, _Vector, float, np.ndarray, _Vector, bool, np.ndarray], float
]
"""(the arguments of a DeltaKernel; the payload, uint8 (r, c); left, fp32 (r, ROW_NUMEL), which may
be x; whether `left` gets the decoded payload instead of what the payload leaves out; squares, fp32
(r, 2)) -> as a DeltaKernel.

It encodes and decodes x row by row, and adds up the squares of what is left out, and those of x, as
a tree of halves."""

MergeKernel = Callable[
    [
        np.ndarray, int, np.ndarray, np.ndarray, _Vector, _Vector, float, float, float, float,
        float, float, _Vector, _Vector, np.ndarray,
    ],
    float,
]  # fmt: skip
"""(addresses of M payloads, uint64; `begin`, the element of the vector with which this part
begins; the ends of R stretches of the vector, int64; their weights, float64 (R, M); the part of the
anchor, empty where the mean replaces it; the part of the momentum's vector, empty if there is none;
the rates `decay`, `share`, `stretch`, `momentum`, `lr` of an outer step; a limit; the next anchor
and the next momentum, which are written: fp32 N, contiguous; the lanes of the digests of both,
uint64 (2, D, 8), which are written) -> the greatest magnitude in the next anchor. A magnitude that
reaches the limit, NaN and Inf included, ends the work with its row.

`begin` is a multiple of 2^20. D: number of whole blocks of 2^20 elements in the part, whose
digests `finish_hashes` makes from the lanes; 0: no digest is wanted. Payloads of float32 begin at a
multiple of 4 bytes."""

SignsKernel = Callable[[int, int, _Vector], tuple[int, int]]
"""(address of a payload; `begin`, the element with which this part begins; the part of the
momentum's vector: fp32 N, contiguous, whole rows) -> the number of elements with the same sign, and
with the other one; 0 has no sign."""

ApplyKernel = Callable[[_Vector, _Vector, _Vector, _Vector, bool, float], None]
"""(theta, which is written; the anchor; the delta, empty where none is named; the next anchor: fp32
n, contiguous; whether to blend, and by which alpha): `fragment.apply.realign` for every mode but
overwrite."""

GramKernel = Callable[[np.ndarray, int, np.ndarray, np.ndarray], int]
"""(addresses of M vectors of fp32, uint64; their number of elements; bins, int64 (R, M), and sums,
int64 (R, 2, 2M, 2M), zeros, which are written) -> number of records. R is at least the number of
rows of 512 elements. Each record is a `merge.Gram` of some rows. Its sums are high * 2^32 + low,
and only those of a vector with itself or a later one are there."""

_Product = Callable[[np.ndarray, np.ndarray, float, np.ndarray], None]


class ProductKernels(NamedTuple):
    """(X, basis, scale, out): X is fp32 (m, n), and is rounded to whole numbers once it is
    multiplied by the scale, a power of two. The basis and `out`, which is written, are float64 with
    r rows. right: the transpose of X Q, for Q as rows (r, n); left: the transpose of X^T L, for L
    as rows (r, m). All are contiguous. The sums must be exact in float64."""

    right: _Product
    left: _Product


DeviceOfferKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
"""(delta, anchor, residual, left: fp32 N; payload: uint8 B; found: fp32 (4, G), G = N / ROW_NUMEL
rounded up), all contiguous on one GPU, and after `left` memory up to G * ROW_NUMEL;
kernels.triton_offers says what is written. Runs on the current stream."""


def device_offer_kernel(codec: str, in_weights: bool) -> DeviceOfferKernel:
    """The kernel of the codec of this name: bfloat16, int8, int4, e3m0 or topk. `in_weights`:
    `left` gets the decoded payload. It is compiled when it first runs on a device. Raises
    ImportError without Triton."""
    from mend.kernels import triton_offers

    return triton_offers.kernel(codec, in_weights)


@cache
def _numba() -> Any:
    """numba, which numbers what it compiles so that no other process has the same numbers.

    numba names machine code by name, types and this number, and a process that takes code from the
    cache binds a name that it knows to the code that it has. Its numbers begin at 1 in every
    process, so two processes could keep different functions under one name, and a third one would
    run one of them in place of the other."""
    numba = import_module("numba")
    _renumber()
    os.register_at_fork(after_in_child=_renumber)
    return numba


def _renumber() -> None:
    identity = import_module("numba.core.bytecode").FunctionIdentity
    identity._unique_ids = count(secrets.randbits(48))


@cache
def _numba_works() -> bool:
    """Whether numba can be used. Warns where it is installed and cannot."""
    if find_spec("numba") is None:
        return False
    return _call_or_warn(_numba) is not None


def _call_or_warn(make: Callable[[], Any]) -> Any:
    """What `make` returns; None, with a warning, where numba fails in any way."""
    try:
        return make()
    except Exception as error:  # a numpy that it does not know, or a damaged library
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"codecs run without numba, slower: {reason}", stacklevel=3)
        return None


def _load(module: str, name: str, *arguments: str) -> Any:
    """What mend.kernels.MODULE.NAME makes; None without numba, or where it fails."""
    if not _numba_works():
        return None
    return _call_or_warn(lambda: getattr(import_module(f"mend.kernels.{module}"), name)(*arguments))


# Each is loaded once. None: numba is not installed, or it fails.

block_kernels: Callable[[str], BlockKernels | None] = cache(partial(_load, "blocks", "kernels"))
"""The kernels of the codec of this name: int8, int4, e3m0 or topk."""

offer_kernel: Callable[[str], OfferKernel | None] = cache(partial(_load, "offers", "offer"))
"""Also for bfloat16."""

merge_kernel: Callable[[str], MergeKernel | None] = cache(partial(_load, "merges", "merge"))
"""Also for bfloat16 and float32."""

signs_kernel: Callable[[str], SignsKernel | None] = cache(partial(_load, "merges", "signs"))
"""For the codecs of `merge_kernel`."""

delta_kernel: Callable[[], DeltaKernel | None] = cache(partial(_load, "offers", "delta"))
squares_kernel: Callable[[], SquaresKernel | None] = cache(partial(_load, "offers", "squares"))
apply_kernel: Callable[[], ApplyKernel | None] = cache(partial(_load, "applies", "apply"))
gram_kernel: Callable[[], GramKernel | None] = cache(partial(_load, "grams", "gram"))
product_kernels: Callable[[], ProductKernels | None] = cache(partial(_load, "products", "kernels"))


def finish_hashes(lanes_D8: np.ndarray, size: int) -> bytes:
    """xxh3_128 of each of D blocks of `size` bytes, from their lanes after a `MergeKernel`."""
    finished: bytes = import_module("mend.kernels.hashes").finish(lanes_D8, size)
    return finished


@cache
def chain_kernel(name: str) -> Callable[..., None]:
    """The kernel of this name in kernels.chains, whose bits are defined; there is no other form of
    it. Raises ImportError without numba."""
    kernel: Callable[..., None] = import_module("mend.kernels.chains").kernel(name)
    return kernel


def has_fma() -> bool:
    """Whether this CPU has the instruction that chain kernels need. Raises ImportError without
    numba."""
    return bool(import_module("mend.kernels.chains").has_fma())


@cache
def _sources() -> bytes:
    """The source of all kernels, as they call each other's parts. numba's own check of its cache
    looks at one file only."""
    modules = (each for each in files(__name__).iterdir() if each.name.endswith(".py"))
    return b"".join(each.read_bytes() for each in sorted(modules, key=lambda each: each.name))


def _cache_name(signature: str, function: Callable[..., Any], options: dict[str, Any]) -> str:
    """The name under which numba caches a function. It depends on the code and the options, which
    numba's own key leaves out."""
    plain = {n: sorted(each) if isinstance(each, set) else str(each) for n, each in options.items()}
    about = repr((signature, sorted(plain.items())))
    key = hashlib.sha256(about.encode() + _sources()).hexdigest()[:16]
    return f"{function.__name__}_{key}"


def compiled(signature: str, function: _Function, **options: Any) -> _Function:
    """Compile for these types. Divisions by 0 give the result of the processor."""
    numba = _numba()
    options = {"nogil": True, "error_model": "numpy", **options}
    made: _Function
    try:
        function.__qualname__ = _cache_name(signature, function, options)
        made = numba.njit(signature, cache=True, **options)(function)
    except Exception:  # no place for the cache that can be written to, a full disk, a damaged file
        made = numba.njit(signature, **options)(function)
    return made


def part(function: _Function, **options: Any) -> _Function:
    """A part of kernels, compiled with the first kernel that calls it, for the types of that call.
    Parts of one module have different names, as numba names their machine code by these."""
    function.__qualname__ = function.__name__  # a copy with other globals has the original's
    made: _Function = _numba().njit(error_model="numpy", **options)(function)
    return made
