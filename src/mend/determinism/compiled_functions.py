"""Functions of elementwise operators as one kernel each, on a GPU at level shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mend.determinism.coverage import Coverage, draws
from mend.determinism.digests import same_bits
from mend.determinism.enabling import Determinism, enabled
from mend.errors import NotDeterministic, UsageError

DEVICES = ("cuda",)
"""On a CPU, compiled code computes the end of a vector in another way than its middle."""

COMPILER: dict[str, Any] = {"options": {"emulate_precision_casts": True}}
"""It rounds after every operator, as torch does, so that bits depend less on which operators it
puts into one kernel."""

ALLOWED = frozenset(
    ("rsqrt", "rsqrt_", "sigmoid", "silu", "silu_backward", "gelu", "gelu_backward")
)
"""Besides coverage.SAFE."""

Function = Callable[..., Tensor]


def elementwise(function: Function) -> Function:
    """Compile `function` into one kernel for its value and one for its gradients, on a GPU at level
    shape. Elsewhere it runs as it is. A decorator:

        @elementwise
        def swiglu(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            return F.silu(gate) * up

    `function` takes tensors and returns one. Its operators compute element by element, move
    elements, or take a maximum or minimum. An argument that needs a gradient must not be broadcast,
    as its gradient would be a sum.

    The bits may differ from those without the decorator: `settings` of enable() lists the
    functions. They do not depend on how the batch is cut. The first call with every combination of
    dtypes and numbers of dimensions checks the operators, and compares the result with that of two
    halves of the batch, which is the first dimension of the result.

    Raises UsageError for arguments or a result that are not as above, and NotDeterministic for
    other operators, for halves with other bits, and for what torch cannot compile as a whole.
    """
    compiled = _Compiled(function)

    @wraps(function)
    def call(*args: Tensor) -> Tensor:
        state = enabled()
        if state is None or state.level != "shape" or not compiled.is_for(args):
            return function(*args)
        compiled.check(args)
        compiled.list_in(state)
        result: Tensor = _Elementwise.apply(compiled, *args)  # type: ignore[no-untyped-call]
        return result

    return call


class _Compiled:
    """A function and its gradients, and the kinds of arguments that were checked."""

    def __init__(self, function: Function) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._function = function
        self._checked: set[Any] = set()
        self._listed_in: Determinism | None = None
        self._compiled: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def is_for(self, args: tuple[Any, ...]) -> bool:
        for place, arg in enumerate(args):
            if not isinstance(arg, Tensor):
                raise UsageError(
                    f"argument {place} of {self.name} is not a tensor but {type(arg).__name__}; "
                    "@elementwise takes tensors: bind the others with functools.partial"
                )
        return bool(args) and all(arg.device.type in DEVICES for arg in args)

    def value(self, args: Sequence[Tensor]) -> Tensor:
        result: Tensor = self._run((), args)
        return result

    def gradients(
        self, args: Sequence[Tensor], needs: tuple[bool, ...], grad: Tensor
    ) -> list[Tensor | None]:
        """None for an argument that needs none."""
        made = iter(self._run(needs, [*args, grad]))
        return [next(made) if need else None for need in needs]

    def _gradients(self, needs: tuple[bool, ...]) -> Callable[..., Any]:
        """What is in between is computed again, which takes less time than reading it."""

        def pulled(*given: Tensor) -> Any:
            *args, grad = given

            def of_some(*some: Tensor) -> Tensor:
                left = iter(some)
                return self._function(
                    *(next(left) if need else arg for arg, need in zip(args, needs, strict=True))
                )

            chosen = [arg for arg, need in zip(args, needs, strict=True) if need]
            return torch.func.vjp(of_some, *chosen)[1](grad)

        # A code object of its own: torch counts recompilations by it, and has a limit.
        pulled.__code__ = pulled.__code__.replace(co_name=f"gradients of {self.name}")
        return pulled

    def _run(self, needs: tuple[bool, ...], args: Sequence[Tensor]) -> Any:
        """The gradients of the arguments that need one, the last of `args` being the result's; the
        value where `needs` is empty."""
        if needs not in self._compiled:
            function = self._gradients(needs) if needs else self._function
            self._compiled[needs] = torch.compile(function, fullgraph=True, **COMPILER)
        given = [arg.detach() for arg in args]
        for arg in given:  # one kernel for all batches; known sizes elsewhere make it faster
            if arg.dim():
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        try:
            with _disable_current_modes(), torch.no_grad():
                return self._compiled[needs](*given)
        except Exception as fault:
            exc = torch._dynamo.exc  # half a second to import
            if not isinstance(fault, (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)):
                raise
            raise NotDeterministic(
                f"torch cannot compile {self.name} as a whole: {str(fault).splitlines()[0]}",
                "remove @elementwise from it, or the part that is named",
            ) from fault

    def list_in(self, state: Determinism) -> None:
        if self._listed_in is not state:
            self._listed_in = state
            names = {*state.settings.get("compiled", "").split(", "), self.name} - {""}
            state.settings["compiled"] = ", ".join(sorted(names))

    def check(self, args: tuple[Tensor, ...]) -> None:
        """Once for every kind of arguments."""
        kind = tuple((arg.dtype, arg.dim(), arg.requires_grad, arg.device) for arg in args)
        if kind in self._checked:
            return
        with torch.enable_grad():
            result = self._watched(args)
        args = tuple(arg.detach() for arg in args)
        needs = tuple(needs for _, _, needs, _ in kind)
        whole = self._results(args, needs, result)
        count = result.shape[0] if result.dim() else 1
        for rows in (slice(count // 2), slice(count // 2, None)) if count > 1 else ():

            def cut(each: Tensor, rows: slice = rows) -> Tensor:
                return each[rows] if each.dim() and each.shape[0] == count else each

            half = self._results([cut(arg) for arg in args], needs, cut(result))
            for ours, its in zip(map(cut, whole), half, strict=True):
                if ours.shape != its.shape or not same_bits(ours, its):
                    raise NotDeterministic(
                        f"{self.name}, compiled, has other bits for half of the batch",
                        "its first dimension must be the batch; or remove @elementwise from it",
                    )
        self._checked.add(kind)

    def _results(
        self, args: Sequence[Tensor], needs: tuple[bool, ...], grad: Tensor
    ) -> list[Tensor]:
        grads = self.gradients(args, needs, grad) if any(needs) else []
        return [self.value(args), *(each for each in grads if each is not None)]

    def _watched(self, args: tuple[Tensor, ...]) -> Tensor:
        """The result by operators that must all be allowed; the gradients are computed for the same
        reason."""
        given = [arg.detach().requires_grad_(arg.requires_grad) for arg in args]
        versions = [arg._version for arg in given]
        with _Operators(self.name):
            with torch._C._AutoDispatchBelowAutograd():  # mend's own linear() is above the mode
                self._function(*(arg.detach() for arg in given))
            result = self._function(*given)
            if not isinstance(result, Tensor):
                raise UsageError(f"{self.name} returns no tensor; @elementwise needs one")
            if [arg._version for arg in given] != versions:
                raise UsageError(f"{self.name} writes into its arguments; @elementwise forbids it")
            if result.requires_grad:
                chosen = [arg for arg in given if arg.requires_grad]
                torch.autograd.grad(result, chosen, result.detach())
        return result.detach()


class _Operators(Coverage):  # type: ignore[no-untyped-call]
    """Refuses by name what is not elementwise."""

    def __init__(self, name: str) -> None:
        super().__init__(ALLOWED, strict=True)
        self._name, safe = name, self._rules
        self._rules = lambda func, reached: not draws(func) and safe(func, reached)

    def note(self, name: str, remedy: str) -> NoReturn:
        raise NotDeterministic(
            f"{name} in {self._name} or in its gradient is not elementwise",
            "move it out of the function; an argument that is broadcast must not need a gradient",
        )


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: _Compiled, *args: Tensor) -> Tensor:
        kind = args[0].device.type
        ctx.compiled = compiled
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(*args)
        return compiled.value(args)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        with torch.autocast(*ctx.autocast):  # as the value was computed
            return None, *ctx.compiled.gradients(ctx.saved_tensors, needs, grad)
