"""Watches the operators that a thread runs at level shape. Those on tensors of floating point
that are not known to keep bits are counted, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from mend.determinism.layout import layout
from mend.errors import NotDeterministic

_SHAPES = """
    alias as_strided detach detach_ expand permute transpose transpose_ t t_ view _unsafe_view
    _reshape_alias reshape unfold select slice split split_with_sizes chunk squeeze squeeze_
    unsqueeze unsqueeze_ diagonal unbind narrow movedim view_as_real lift_fresh
    lift numpy_T flatten
    select_backward slice_backward diagonal_backward as_strided_scatter slice_scatter
    select_scatter
"""

_COPIES = """
    clone copy_ copy _to_copy to contiguous cat stack repeat repeat_interleave roll flip tril triu
    tril_ triu_ constant_pad_nd gather index index_select take_along_dim where masked_fill
    masked_fill_ masked_select masked_scatter masked_scatter_ embedding
    split_with_sizes_copy unfold_copy
    sort topk argsort _local_scalar_dense item set_ resize_ resize_as_ new_empty
    index_copy index_copy_ index_fill_ index_fill fill_diagonal_ diag_embed is_same_size
    _foreach_copy_ _chunk_cat chunk_cat _foreach_zero_ nll_loss_backward scatter scatter_ expand_as
    _pin_memory is_pinned pin_memory record_stream data_ptr equal
"""

_MAKES = """
    empty empty_strided empty_like new_empty_strided new_zeros new_ones new_full zeros zeros_like
    ones ones_like full full_like fill_ fill zero_ zero arange linspace eye scalar_tensor
    tensor
"""

_RANDOM = "normal_ uniform_ rand randn randint randperm trunc_normal_"
"""Random numbers for weights and data, made before they are cut into batches (draws()); those of
bernoulli and rand_like are made inside of a model: their bits depend on the batch."""

_ELEMENTS = """
    add add_ sub sub_ rsub mul mul_ div div_ true_divide neg neg_ abs abs_ sign sgn sqrt sqrt_
    reciprocal reciprocal_ exp exp_ log log_ tanh tanh_ erf sin sin_ cos cos_ maximum minimum
    clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ relu relu_ threshold_backward
    floor ceil round trunc isnan isinf isfinite eq ne lt le gt ge logical_not logical_and logical_or
    bitwise_not signbit copysign nan_to_num nan_to_num_ tanh_backward sigmoid_backward leaky_relu
    leaky_relu_backward hardtanh hardtanh_backward fmod remainder
    lerp lerp_ addcmul addcmul_ addcdiv addcdiv_
    _foreach_add_ _foreach_add _foreach_sub_ _foreach_sub _foreach_mul_ _foreach_mul _foreach_div_
    _foreach_div _foreach_neg_ _foreach_neg _foreach_sqrt_ _foreach_sqrt _foreach_lerp_
    _foreach_addcmul_ _foreach_addcdiv_ _foreach_reciprocal_ _foreach_maximum_ _foreach_clamp_max_
    _foreach_clamp_min_
"""

_EXACT = """
    amax amin max min argmax argmin any all count_nonzero nonzero isin _unique2 allclose
    isclose
"""

SAFE = frozenset(" ".join((_SHAPES, _COPIES, _MAKES, _RANDOM, _ELEMENTS, _EXACT)).split())
"""Operators that add nothing up, or add element by element (laws.py)."""

EXPONENTS = (0, 0.5, 1, 2, 3, -0.5, -1, -2)
"""Of pow(tensor, number): those that torch makes from products and roots."""

_OTHERWISE = """
    sort topk argsort exp exp_ log log_ tanh tanh_ erf sin sin_ cos cos_ sqrt sqrt_
    round fmod remainder tanh_backward sigmoid_backward lerp lerp_ addcmul addcmul_ addcdiv addcdiv_
    _foreach_div_ _foreach_div _foreach_sqrt_ _foreach_sqrt _foreach_lerp_ _foreach_addcmul_
    _foreach_addcdiv_ _foreach_reciprocal_ linspace
"""

SAFE_EVERYWHERE = SAFE - frozenset(_OTHERWISE.split())
"""Those that are one correctly rounded operation of IEEE 754 on every device, or none."""

PRODUCTS = frozenset(("mul", "mul_", "div", "div_"))
"""Of complex numbers the tail of a vector has other bits than its body."""

_SCALED = "add add_ sub sub_ rsub _foreach_add _foreach_add_ _foreach_sub _foreach_sub_"

SCALED = frozenset(_SCALED.split())
"""With alpha: one device multiplies and adds in one operation, and another in two. Of bf16 and fp16
a CPU rounds the product in the tail of a vector, and not in its body."""

WHOLE_EXPONENTS = (1, 2, 3)

_REDUCTIONS = "sum mean var std linalg_vector_norm _foreach_norm dot mse_loss nll_loss_forward"

REDUCTIONS = frozenset(_REDUCTIONS.split())
"""Of this room, for real numbers that are whole here: a DTensor adds up its shards below the
watch, in an order of its own."""

MAKERS = frozenset(("arange", "linspace", "logspace"))
"""Of numbers that devices compute in ways of their own, unless they are whole."""

RANDOM = frozenset(_RANDOM.split())

FUSED = ("_fused_adamw_", "_fused_adam_", "_fused_sgd_")
"""Steps of optimizers that add element by element on CUDA; on a CPU their vectors have tails."""

NAMES_MAX = 256

REMEDY = "use an operator of docs/determinism.md"

REMEDY_OF_COMPLEX = "compute with real numbers, such as a pair of cosine and sine"

REMEDY_OF_SHARDS = (
    "use DeterministicTrainer(grad_norm_max=...) or mend.determinism.clipping.clip_grad_norm for "
    "norms of gradients, full_tensor() for others"
)

REMEDY_OF_DRAWS = "use F.dropout, or draw for the whole batch before it is cut"


def _keys(*names: str) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    return keys | _keys(*names[1:]) if len(names) > 1 else keys


MODES = _keys("Python", "PythonTLSSnapshot")
"""The second puts every operator's arguments into boxes where a mode is on, seen by it or not."""

_ABOVE = MODES | _keys("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")


class Coverage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`unreached`: name -> how often it ran. Refuses in place of counting where `strict`."""

    def __init__(self, reached: frozenset[str], strict: bool, level: str = "shape") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reached, self._strict, self._level = reached, strict, level
        self._rules = _rules_everywhere if level == "everywhere" else _rules
        self._known: dict[Any, bool | None] = {}
        self.unreached: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps a mode in two more calls unless this says no."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        keeps = self._known.get(func, 0)
        if keeps is True:  # nearly all, and each costs more by being watched than by running
            return func(*args, **kwargs)
        if keeps == 0:
            keeps = self._known[func] = self._rules(func, self._reached)
        if keeps is None:
            keeps = _keeps_with(func, args, kwargs, self._level)
        if not keeps and (_makes(func) or _has_floats(args, kwargs)):
            self.note(str(func), _remedy(func, args))
        return func(*args, **kwargs)

    def note(self, name: str, remedy: str) -> None:
        if self._strict:
            raise NotDeterministic(
                f"{name} is not reached at level {self._level}: its bits may depend on "
                f"the {'device' if self._level == 'everywhere' and remedy == REMEDY else 'batch'}",
                f"{remedy}, or enable(..., strict=False), which lists it",
            )
        if name in self.unreached or len(self.unreached) < NAMES_MAX:
            self.unreached[name] += 1


class unseen:
    """Inside, operators are this room's own: below autograd, and Coverage does not see them. Memory
    that they ask for is not filled first, as torch does where algorithms are deterministic: they
    read nothing that they have not written."""

    __slots__ = ("_excluded", "_filled")

    def __enter__(self) -> None:
        self._filled = torch._C._get_deterministic_fill_uninitialized_memory()
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        self._excluded = torch._C._ExcludeDispatchKeyGuard(_ABOVE)
        self._excluded.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *fault: object) -> None:
        self._excluded.__exit__(None, None, None)
        torch._C._set_deterministic_fill_uninitialized_memory(self._filled)


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` inside unseen()."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with unseen():
            return function(*args, **kwargs)

    return kernel


def _rules(func: Any, reached: frozenset[str]) -> bool | None:
    """Of level shape. None: it depends on the arguments."""
    space, _, name = func._schema.name.partition("::")
    overload = func._schema.overload_name
    if space == "aten":
        if name in ("pow", "pow_", "index_put_", *FUSED, *SCALED, *PRODUCTS) or draws(func):
            return None
        full = f"{name}.{overload}" if overload else name
        if full in reached:
            return None if name in REDUCTIONS else True
        return name in SAFE and "reduce" not in overload  # scatter.reduce
    if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return None if "reduce" in name else True  # the others only move bytes
    return space in ("fsdp", "profiler", "prim")


def _rules_everywhere(func: Any, reached: frozenset[str]) -> bool | None:
    """None: it depends on the arguments."""
    space, _, name = func._schema.name.partition("::")
    if space != "aten":
        return _rules(func, reached)
    overload = func._schema.overload_name
    if name in ("pow", "index_put_", *MAKERS, *SCALED) or draws(func):
        return None
    if name in PRODUCTS and "mode" not in overload:
        return None
    full = f"{name}.{overload}" if overload else name
    if full in reached:
        return None if name in REDUCTIONS else True
    return bool(name in SAFE_EVERYWHERE and "reduce" not in overload and "mode" not in overload)


def draws(func: Any) -> bool:
    """Whether it makes random numbers that may be made outside of a model."""
    name = func._schema.name.removeprefix("aten::")
    return name in RANDOM or name == "random_" or str(func) == "aten.normal.float_float"


def _draws_by_part(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a batch is computed, each part of which draws the same numbers, and more than one:
    the one number that a layer draws is the same in all of them. A generator of the caller's own
    is his to seed (enabling.UNSEEN)."""
    at = layout()
    if not (at.count or at.lengths) or kwargs.get("generator") is not None:
        return False
    shape: Any = next((each for each in args if isinstance(each, (Tensor, list, tuple))), (0,))
    return bool(shape.dim() if isinstance(shape, Tensor) else len(shape))


def _remedy(func: Any, args: Sequence[Any]) -> str:
    if draws(func):
        return REMEDY_OF_DRAWS
    if "complex" in str(func) or any(map(_is_complex, _flat(args))):
        return REMEDY_OF_COMPLEX
    return REMEDY_OF_SHARDS if any(map(_is_cut, _flat(args))) else REMEDY


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _is_cut(value: Any) -> bool:
    return isinstance(value, DTensor) and not all(
        isinstance(place, Replicate) for place in value.placements
    )


def _makes(func: Any) -> bool:
    return func._schema.name.removeprefix("aten::") in MAKERS or draws(func)


def _has_floats(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(_counts(each) for each in _flat((args, list(kwargs.values()))))


def _has_narrow_on_cpu(args: Sequence[Any]) -> bool:
    return any(
        isinstance(each, Tensor) and each.is_cpu and each.dtype in (torch.bfloat16, torch.float16)
        for each in _flat(args)
    )


def _keeps_with(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], level: str = "shape"
) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if name in PRODUCTS or name in REDUCTIONS:
        cut = name in REDUCTIONS and any(map(_is_cut, _flat(args)))
        return not cut and not any(map(_is_complex, _flat(args)))
    if draws(func):
        return not _draws_by_part(args, kwargs)
    if name in SCALED:
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        return bool(alpha == 1) or (level == "shape" and not _has_narrow_on_cpu(args))
    if level == "everywhere":
        if name in MAKERS:
            numbers = [each for each in args if isinstance(each, (int, float))]
            return name == "arange" and all(each == int(each) for each in numbers)
        if name == "pow":
            return (
                len(args) > 1 and isinstance(args[1], (int, float)) and args[1] in WHOLE_EXPONENTS
            )
    if func._schema.name == "aten::index_put_":
        return not (len(args) > 3 and args[3]) and not kwargs.get("accumulate")
    if func._schema.name.removeprefix("aten::") in FUSED:
        return all(each.is_cuda for each in args[0])
    if func._schema.name.startswith("aten::"):
        return len(args) > 1 and isinstance(args[1], (int, float)) and args[1] in EXPONENTS
    text = " ".join(_reduction(each) for each in (*args, *kwargs.values())).lower()
    return "max" in text or "min" in text


def _reduction(value: Any) -> str:
    if isinstance(value, str):
        return value
    kind = getattr(value, "op", None)  # torch's script object of a ReduceOp
    return str(kind()) if callable(kind) else ""


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _counts(value: Any) -> bool:
    """Whether its bits can depend on an order: floating point, on a device that has kernels."""
    if not isinstance(value, Tensor):
        return False
    return value.device.type in ("cpu", "cuda") and (
        value.is_floating_point() or value.is_complex()
    )
