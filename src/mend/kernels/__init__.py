"""kernels: what torch needs many passes for, compiled by numba, where numba is installed.

A kernel gives the bits of the torch code beside which it is used, and runs without the
interpreter's lock. It is compiled when it is first asked for: seconds, or less where numba finds in
its cache (`NUMBA_CACHE_DIR`, else beside the source, else that of the user) what it made before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np


class BlockKernels(NamedTuple):
    """A codec of blocks. encode: fp32 (b, k) -> uint8 (b, c); decode: the way back. Both arrays are
    contiguous and the second one is written."""

    encode: Callable[[np.ndarray, np.ndarray], None]
    decode: Callable[[np.ndarray, np.ndarray], None]


@cache
def block_kernels(codec: str) -> BlockKernels | None:
    """Those of the codec of this name, int8, int4, e3m0 or topk; None without numba. Warns where
    numba is installed and cannot be used."""
    if find_spec("numba") is None:
        return None
    try:
        from mend.kernels import blocks
    except ImportError as error:  # with a numpy that it does not know yet, say
        warnings.warn(f"codecs run without numba, slower: {error}", stacklevel=2)
        return None
    return blocks.compiled(codec)


__all__ = ["BlockKernels", "block_kernels"]
