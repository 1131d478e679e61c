"""Compiles cuda_code.py for the GPU at hand with NVRTC, which comes with torch, and runs it.
Touches tensors only; no compiler is needed on the machine."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mend.determinism import cuda_code
from mend.errors import NotDeterministic

GRID_MAX = 65535
"""Of blocks in the third dimension."""

INT_MAX = 2**31 - 1


def apply(name: str, *tensors: Tensor) -> Tensor:
    """The elementary function of this name, of contiguous fp32 tensors of one shape."""
    out = torch.empty_like(tensors[0])
    numel = out.numel()
    if numel > INT_MAX:
        raise NotDeterministic(f"{name} of {numel} elements", f"use at most {INT_MAX}")
    if numel:
        kernel = _module(out.device.index, "maps")[f"map_{name}"]
        blocks = min(-(-numel // 256), 1 << 16)
        _launch(kernel, out.device, (blocks, 1, 1), *tensors, out, numel)
    return out


def row_sums(x_ND: Tensor) -> Tensor:
    """(N), of contiguous fp32."""
    rows, features = x_ND.shape
    out = torch.empty(rows, device=x_ND.device, dtype=torch.float32)
    if rows:
        kernel = _module(out.device.index, "row_sums")["row_sums"]
        _launch(kernel, out.device, (-(-rows // 8), 1, 1), x_ND, out, rows, features)
    return out


def product(a_ZMK: Tensor, b_ZKN: Tensor) -> Tensor:
    """a @ b as (Z, M, N), of fp32 with any strides."""
    (batch, rows, pairs), columns = a_ZMK.shape, b_ZKN.shape[2]
    out = torch.empty(batch, rows, columns, device=a_ZMK.device, dtype=torch.float32)
    if not out.numel():
        return out
    a, b = _plain(a_ZMK), _plain(b_ZKN.transpose(1, 2))
    wide = rows > 64 and columns > 64
    a_along, a_step, a_vector = _layout(a)
    b_along, b_step, b_vector = _layout(b)
    key = f"product {int(wide)}{int(a_along)}{int(b_along)}{int(a_vector)}{int(b_vector)}"
    kernel = _module(out.device.index, key)["product"]
    tile = 128 if wide else 64
    blocks = -(-rows // tile) * -(-columns // tile)
    for first in range(0, batch, GRID_MAX):
        some = min(GRID_MAX, batch - first)
        parts = (x[first : first + some] for x in (a, b, out))
        sizes = (rows, columns, pairs, a_step, b_step, a.stride(0), b.stride(0))
        _launch(kernel, out.device, (blocks, 1, some), *parts, *sizes)
    return out


def _plain(x_ZRK: Tensor) -> Tensor:
    """With neighbours in memory along K or along the rows, and strides that fit the kernel."""
    neighbours = 1 in (x_ZRK.stride(1), x_ZRK.stride(2))
    return x_ZRK if neighbours and max(x_ZRK.stride()) <= INT_MAX else x_ZRK.contiguous()


def _layout(x_ZRK: Tensor) -> tuple[bool, int, bool]:
    """(whether K lies along memory, the stride of the other dimension, whether 4 elements are read
    at once)."""
    along = x_ZRK.stride(2) == 1
    step = x_ZRK.stride(1) if along else x_ZRK.stride(2)
    neighbours = x_ZRK.shape[2] if along else x_ZRK.shape[1]
    whole = not (neighbours % 4 or step % 4 or x_ZRK.stride(0) % 4)
    return along, step, whole and x_ZRK.data_ptr() % 16 == 0


def _launch(kernel: Any, device: torch.device, grid: tuple[int, int, int], *args: Any) -> None:
    with torch.cuda.device(device):
        kernel(grid=grid, block=(256, 1, 1), args=list(args))


@cache
def _module(device: int, key: str) -> dict[str, Any]:
    """name -> kernel."""
    from mend.kernels import elementary

    kind, _, flags = key.partition(" ")
    if kind == "maps":
        source = cuda_code.maps_source()
        names = [f"map_{name}" for name in (*elementary.UNARY, *elementary.BINARY)]
    elif kind == "row_sums":
        source, names = cuda_code.ROW_SUMS, ["row_sums"]
    else:
        source, names = cuda_code.product_source(*(flag == "1" for flag in flags)), ["product"]
    from torch.cuda._utils import _cuda_load_module

    with torch.cuda.device(device):
        loaded = _cuda_load_module(_compiled(source), names)
    return dict(loaded)  # type: ignore[arg-type]  # with names it is a dict


def _compiled(source: str) -> bytes:
    """Machine code for the current device."""
    from torch.cuda._utils import _get_gpu_rtc_library

    library = _get_gpu_rtc_library()
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"everywhere.cu", 0, None, None
    )
    _check(library, made, None)
    array = (ctypes.c_char_p * len(options))(*options)
    _check(library, library.nvrtcCompileProgram(program, len(options), array), program)
    size = ctypes.c_size_t()
    _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)), None)
    code = ctypes.create_string_buffer(size.value)
    _check(library, library.nvrtcGetCUBIN(program, code), None)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _check(library: Any, result: int, program: ctypes.c_void_p | None) -> None:
    """Raises NotDeterministic with the compiler's words."""
    if not result:
        return
    reason = f"NVRTC returned {result}"
    if program is not None:
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        reason += f": {log.value.decode(errors='replace')[:2000]}"
    raise NotDeterministic(
        f"kernels of level everywhere were not compiled; {reason}", "report this"
    )
