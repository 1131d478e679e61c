"""Products, sums of rows and elementary functions of level everywhere, on the device of the
tensors: by numba on a CPU, by NVRTC on a GPU, with equal bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mend.determinism import cuda_kernels
from mend.determinism.fitting import no_product, same_shapes
from mend.errors import NotDeterministic
from mend.kernels import chain_kernel


def product(a_ZMK: Tensor, b_ZKN: Tensor) -> Tensor:
    """a @ b as (Z, M, N): one chain of fused multiply-adds over K, of fp32."""
    refuse_other_types("a matrix product", a_ZMK, b_ZKN)
    if a_ZMK.shape[::2] != b_ZKN.shape[:2]:
        raise no_product(a_ZMK, b_ZKN)
    if a_ZMK.is_cuda:
        return cuda_kernels.product(a_ZMK, b_ZKN)
    out = _empty(*a_ZMK.shape[:2], b_ZKN.shape[2])
    chain_kernel("product")(_array(a_ZMK), _array(b_ZKN), out.numpy())
    return out


def row_sums(x_ND: Tensor) -> Tensor:
    """(N): sums over the last dimension, in the order of kernels/chains.py."""
    refuse_other_types("a sum", x_ND)
    if x_ND.is_cuda:
        return cuda_kernels.row_sums(x_ND.contiguous())
    out = _empty(x_ND.shape[0])
    chain_kernel("row_sums")(_array(x_ND), out.numpy())
    return out


def apply(name: str, *tensors: Tensor) -> Tensor:
    """The function of kernels/elementary.py, of tensors of one shape."""
    refuse_other_types(name, *tensors)
    tensors = tuple(same_shapes(tensors))
    if tensors[0].is_cuda:
        return cuda_kernels.apply(name, *(each.contiguous() for each in tensors))
    out = _empty(*tensors[0].shape)
    arrays = [_array(each).reshape(-1) for each in tensors]
    chain_kernel(name)(*arrays, out.numpy().reshape(-1))
    return out


def refuse_other_types(name: str, *tensors: Tensor) -> None:
    """Raises NotDeterministic by name."""
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            raise NotDeterministic(
                f"{name} of {tensor.dtype} is not defined at level everywhere", "use float32"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotDeterministic(
                f"{name} on {tensor.device.type} is not defined at level everywhere",
                "train on a CPU or a GPU of CUDA",
            )


def _empty(*shape: int) -> Tensor:
    """Whatever the script's default device and type are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _array(x: Tensor) -> np.ndarray:
    array: np.ndarray = x.detach().contiguous().numpy()
    return array
