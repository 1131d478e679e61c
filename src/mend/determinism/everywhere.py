"""Registers the operators of level everywhere for the CPU and for CUDA: one table, whose bits
depend on no device. Sums are those of chains.py and trees.py, elementary functions those of
kernels/elementary.py, random numbers those of chance.py; what torch still computes is one correctly
rounded operation of IEEE 754 for every element."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mend.determinism import chains, chance, gemm, kernels, reach
from mend.determinism.coverage import unwatched
from mend.determinism.digests import same_bits
from mend.errors import NotDeterministic
from mend.kernels import has_fma

ELEMENTARY = {
    "exp": "exp",
    "log": "log",
    "rsqrt": "rsqrt",
    "sqrt": "root",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "erf": "erf",
    "sin": "sin",
    "cos": "cos",
    "silu": "silu",
}
"""aten's name -> ours, of one tensor; aten's with a _ behind it is in place."""


def _elementary(name: str) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        if name == "root" and x.dtype == torch.float64:
            return _root_of_doubles(x)
        return chains.apply(name, x if x.is_floating_point() else x.float())

    return compute


def _in_place(name: str) -> Callable[[Tensor], Tensor]:
    compute = _elementary(name)

    def compute_in_place(x: Tensor) -> Tensor:
        return x.copy_(compute(x))

    return compute_in_place


def _root_of_doubles(x: Tensor) -> Tensor:
    """Norms of mend's exchange are in fp64; numpy's root is the processor's, rounded correctly."""
    if x.is_cuda:
        return torch.sqrt(x, out=torch.empty_like(x))
    return torch.from_numpy(np.asarray(np.sqrt(x.detach().numpy())))


def _of_gradient(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(grad: Tensor, other: Tensor) -> Tensor:
        return chains.apply(name, grad.expand(other.shape), other)

    return compute


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """aten::gelu."""
    return chains.apply("gelu" if approximate == "none" else "gelu_tanh", x)


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """aten::gelu_backward."""
    name = "gelu_backward" if approximate == "none" else "gelu_tanh_backward"
    return chains.apply(name, grad, x)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """aten::_log_softmax."""
    away = x - x.amax(dim, True)
    return away.sub_(kernels.sums_along(away.exp(), dim).log_())


def log_softmax_backward(
    grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """aten::_log_softmax_backward_data."""
    return grad - output.exp().mul_(kernels.sums_along(grad, dim))


def div(x: Tensor | float, other: Tensor | float) -> Tensor:
    """aten::div.Tensor. On a GPU torch multiplies by the reciprocal of a number from the CPU, so
    numbers become tensors; on a CPU this changes no bit. The dispatcher gives numbers as such."""
    kind, device = torch.result_type(x, other), _device_of(x, other)
    out = torch.empty(0, dtype=kind if kind.is_floating_point else torch.float32, device=device)
    return torch.div(_tensor_of(x, kind, device), _tensor_of(other, kind, device), out=out)


def div_(x: Tensor, other: Tensor | float) -> Tensor:
    """aten::div_.Tensor."""
    return torch.div(x, _tensor_of(other, torch.result_type(x, other), x.device), out=x)


def _device_of(*values: Tensor | float) -> torch.device:
    """That of a tensor on a GPU, if there is one."""
    devices = [each.device for each in values if isinstance(each, Tensor)]
    return next((each for each in devices if each.type != "cpu"), devices[0])


def _tensor_of(value: Tensor | float, kind: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=kind, device=device)
    return value if value.dim() else value.to(device, kind)


BELOW: dict[str, Callable[..., Any]] = {
    **reach.BELOW,
    **{name: _elementary(own) for name, own in ELEMENTARY.items()},
    **{f"{name}_": _in_place(own) for name, own in ELEMENTARY.items()},
    **{name: _of_gradient(name) for name in ("sigmoid_backward", "tanh_backward", "silu_backward")},
    "_log_softmax": log_softmax,
    "_log_softmax_backward_data": log_softmax_backward,
    "gelu": gelu,
    "gelu_backward": gelu_backward,
    "div.Tensor": div,
    "div_.Tensor": div_,
    "uniform_": chance.uniform_,
    "normal_": chance.normal_,
    "randperm": chance.randperm,
    "randperm.generator": chance.randperm,
}

ON_GPU: dict[str, Callable[..., Any]] = {
    "random_": chance.random_on_gpu,
    "random_.to": chance.random_on_gpu,
    "random_.from": chance.random_on_gpu,
}
"""For CUDA alone: torch's own for the CPU are what is defined."""

REACHED = frozenset(reach.WITH_GRADIENTS) | frozenset(BELOW) | frozenset(ON_GPU)

PRODUCT_SHAPES = ((1, 3, 5, 7), (2, 70, 66, 100), (1, 130, 260, 36))
"""(Z, M, N, K) of the check of a GPU."""


def put_in_place() -> tuple[Callable[[], None], dict[str, str]]:
    """Register all of them for this process. Returns a function that removes them, and settings to
    list. Raises NotDeterministic where a CPU or GPU cannot keep the definition, with what it lacks.
    """
    _refuse_cpu()
    settings = {"kernels": "of mend.determinism; chains of fused multiply-adds"}
    if torch.cuda.is_available():
        _refuse_gpu(torch.cuda.current_device())
        settings["kernels on CUDA"] = "the same, compiled by NVRTC"
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    devices = ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: that it overrides its own kernels
        for device in devices:
            for name, function in reach.WITH_GRADIENTS.items():
                library.impl(name, function, f"Autograd{device}")
                library.impl(name, function, device)
            for name, function in BELOW.items():
                library.impl(name, unwatched(function), device)
        for name, function in ON_GPU.items() if "CUDA" in devices else ():
            library.impl(name, unwatched(function), "CUDA")
    restore_attention = reach.refuse_old_attention()
    gemm.set_whole_chains(True)

    def take_away() -> None:
        gemm.set_whole_chains(False)
        restore_attention()
        library._destroy()

    return take_away, settings


def _refuse_cpu() -> None:
    if find_spec("numba") is None:
        raise NotDeterministic(
            "level everywhere needs numba, which compiles it for this CPU",
            "pip install numba",
        )
    if not has_fma():
        raise NotDeterministic(
            "this CPU has no fused multiply-add, of which level everywhere is made",
            "use another machine, or level shape",
        )
    tiny = torch.full((16,), 1e-39, dtype=torch.float32, device="cpu")
    if not bool((tiny * 1.0 > 0).all()):
        raise NotDeterministic(
            "torch flushes denormal numbers to 0 here", "call torch.set_flush_denormal(False)"
        )


@cache
def _refuse_gpu(index: int) -> None:
    """Compares the GPU's bits with the CPU's: of functions, sums, products and torch's own
    operators."""
    generator, device = torch.Generator("cpu").manual_seed(33), torch.device("cuda", index)
    if broken := [*_broken_functions(generator, device), *_broken_sums(generator, device)]:
        raise NotDeterministic(
            f"this GPU gives other bits than the CPU in {', '.join(broken)}",
            "use another GPU or torch, or level shape",
        )


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _broken_functions(generator: torch.Generator, device: torch.device) -> list[str]:
    from mend.kernels import elementary

    x = torch.cat([_draw(generator, 4099) * scale for scale in (0.01, 1.0, 30.0)])
    y = x.flip(0).contiguous()
    x_d, y_d = x.to(device), y.to(device)
    own = [(name, (x,), (x_d,)) for name in elementary.UNARY]
    both = [(name, (x, y), (x_d, y_d)) for name in elementary.BINARY]
    broken = [
        name
        for name, here, there in (*own, *both)
        if not _alike(chains.apply(name, *here), chains.apply(name, *there))
    ]
    for name in ("add", "sub", "mul", "div", "maximum"):
        here, there = (getattr(torch, name)(a, b) for a, b in ((x, y), (x_d, y_d)))
        if not _alike(here, there):
            broken.append(f"torch.{name}")
    return broken


def _broken_sums(generator: torch.Generator, device: torch.device) -> list[str]:
    broken = []
    for batch, rows, columns, pairs in PRODUCT_SHAPES:
        a, b = _draw(generator, batch, rows, pairs), _draw(generator, batch, pairs, columns)
        made, a_d, b_d = chains.product(a, b), a.to(device), b.to(device)
        a_t, b_t = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a_d, b_d))
        for number, (left, right) in enumerate(((a_d, b_d), (a_d, b_t), (a_t, b_d))):
            if not _alike(made, chains.product(left, right)):
                broken.append(f"product {number} of {(rows, columns, pairs)}")
        if not _alike(chains.row_sums(a[0]), chains.row_sums(a_d[0])):
            broken.append(f"sum of rows of {pairs}")
    return broken


def _alike(here: Tensor, there: Tensor) -> bool:
    """Equal bits, but for those of NaN: no standard says which NaN it is."""
    there = there.cpu()
    nothing = torch.zeros((), dtype=torch.float32, device="cpu")
    return same_bits(here.where(here == here, nothing), there.where(there == there, nothing))
