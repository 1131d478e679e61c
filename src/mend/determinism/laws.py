"""Checks that torch's elementwise kernels give an element the same bits at every place of a tensor.
Runs when level shape is enabled; kernels.py relies on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mend.determinism.digests import same_bits

CPU = torch.device("cpu")

NUMEL = 2053
LENGTHS = (1, 3, 8, 15, 16, 17, 31, 33, 64, 100)
"""Around the lengths of vectors, whose tails have a loop of their own."""

NARROW = (torch.bfloat16, torch.float16)

WIDENED = ("rsqrt", "add with alpha")
"""Those that a CPU keeps in fp32 alone: mend computes the first so, and refuses the second."""

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]

KERNELS: dict[str, Kernel] = {
    "exp": lambda x, y, z: x.exp(),
    "log": lambda x, y, z: z.log(),
    "tanh": lambda x, y, z: x.tanh(),
    "erf": lambda x, y, z: x.erf(),
    "sin": lambda x, y, z: x.sin(),
    "cos": lambda x, y, z: x.cos(),
    "sqrt": lambda x, y, z: z.sqrt(),
    "rsqrt": lambda x, y, z: z.rsqrt(),
    "add with alpha": lambda x, y, z: x.add(y, alpha=0.3),
    "addcmul": lambda x, y, z: x.addcmul(y, z, value=0.3),
    "addcdiv": lambda x, y, z: x.addcdiv(y, z, value=0.3),
    "lerp": lambda x, y, z: x.lerp(y, 0.1),
    "lerp of 0.9": lambda x, y, z: x.lerp(y, 0.9),
}


@cache
def broken_laws(device: torch.device = CPU) -> tuple[str, ...]:
    """Names of the kernels whose bits depend on the place here; none on every machine seen."""
    broken = [name for name, kernel in KERNELS.items() if not keeps(kernel, device)]
    for dtype in NARROW if device.type == "cpu" else ():  # a GPU has one loop, without vectors
        broken += [
            f"{name} of {dtype}"
            for name, kernel in KERNELS.items()
            if name not in WIDENED and not keeps(kernel, device, dtype)
        ]
    return tuple(broken)


def keeps(kernel: Kernel, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> bool:
    """Whether slices of any length, from anywhere, and strided ones give the bits of the whole."""
    generator = torch.Generator().manual_seed(18)
    x, y, z = (torch.randn(NUMEL, generator=generator).to(device, dtype) for _ in range(3))
    z = z.abs() + 0.01
    whole = kernel(x, y, z)
    cuts = [slice(first, first + length) for first in range(0, 34, 3) for length in LENGTHS]
    cuts += [slice(None, None, 3), slice(1, None, 2)]
    return all(same_bits(kernel(x[cut], y[cut], z[cut]), whole[cut]) for cut in cuts)
