"""Counts the steps of whatever optimizer trains a model. Training thread.

torch calls global hooks around the `step` of every optimizer of the process. So mend sees the steps
of the optimizer that `mend_init` was given, of an optimizer that was made after a checkpoint was
loaded, and of one inside a wrapper such as Accelerate's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mend.engine.hooks import scaled_steps
from mend.errors import GaveUp, UsageError

FREED = (
    "the module that mend_init was given was freed, and this rack left the job. Keep a reference "
    "to it, also to a ModuleList of parts"
)


class HoldsParameters(Protocol):
    """An optimizer, or a wrapper around one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Counting(Enum):
    """Which steps are counted.

    GIVEN: steps of the optimizer that mend_init was given. UNDECIDED: none was given, and at most
    one step was seen; it is not counted before the next one, as the script may call
    `runtime.step()` itself. FOUND: steps of the optimizer that was seen first. MANUAL: only calls
    of `runtime.step()`.
    """

    GIVEN = auto()
    UNDECIDED = auto()
    FOUND = auto()
    MANUAL = auto()


def optimizers_of(given: object) -> list[HoldsParameters]:
    """The optimizers that `mend_init(optimizer=...)` names: one, several, or none.

    Raises UsageError for an object without `param_groups`, by its type.
    """
    if given is None:
        return []
    several = isinstance(given, Sequence)
    found: list[HoldsParameters] = []
    for each in given if isinstance(given, Sequence) else [given]:
        if not hasattr(each, "param_groups"):
            what = "a list with " if several else ""
            raise UsageError(
                f"mend_init(optimizer={what}{type(each).__name__}): it has no param_groups. Give "
                "the torch optimizer itself, or none: mend then counts the steps of the one that "
                "trains the model"
            )
        found.append(each)
    return found


def held_by(optimizer: HoldsParameters) -> list[torch.Tensor]:
    """Every parameter of the optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _holds_any(optimizer: HoldsParameters, parts: Mapping[int, ref[nn.Parameter]]) -> bool:
    """Whether the optimizer holds one of these parameters. `parts`: by id, with a reference, as the
    id of a freed parameter may be another object's now."""
    return any((part := parts.get(id(p))) is not None and part() is p for p in held_by(optimizer))


class _Holds(NamedTuple):
    """Whether an optimizer, while it has this number of groups, holds parameters of each kind."""

    groups: int
    counted: bool
    given: bool
    exchanged: bool


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, hidden from `torch.compile`: dynamo must not trace into counting, captures and
    applies, which differ from step to step."""
    call: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return call


class StepHooks:
    """Calls `before` and `after` around each step that moves the counted parameters.

    A step inside another one (SAM, Lookahead, a wrapper that is an optimizer itself) is a part of
    that one. `after` gets the tokens that `take_tokens` gave when the step ended.
    """

    def __init__(
        self,
        exchanged: Iterable[nn.Parameter],
        given: Sequence[HoldsParameters],
        *,
        between: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[int | None], None],
        take_tokens: Callable[[], int | None],
        found: Callable[[torch.optim.Optimizer], None],
        may_be_freed: bool = True,
    ) -> None:
        """`exchanged`: the parameters that mend exchanges. `given`: the optimizers that mend_init
        was given; the steps of the last one count. `between` is called before an optimizer changes
        exchanged parameters (of several, before the first one): the work of the counted steps is
        done by then. `take_tokens` returns the tokens of the step that ends; None: none were
        counted. `found` gets the optimizer whose steps are counted where none was given.
        `may_be_freed=False`: a step of these parameters after this object was freed unclosed raises
        GaveUp, as its rack left the job with the module, and nobody would hear that its parts train
        on."""
        exchanged = list(exchanged)
        self._exchanged = {id(p) for p in exchanged}
        self._counted = {id(p) for p in held_by(given[-1])} if given else set[int]()
        self.counting = Counting.GIVEN if given else Counting.UNDECIDED
        self._given = {id(p) for each in given for p in held_by(each)}
        self._between, self._before, self._after = between, before, after
        self._take_tokens, self._found = take_tokens, found
        self._answers = WeakKeyDictionary[torch.optim.Optimizer, _Holds]()
        self.ends = 0
        """Steps of any optimizer of the process that have ended."""
        self._unfinished = False
        """Whether another optimizer has changed exchanged parameters since the last counted
        step."""
        self._inside: list[int] = []
        """ids of the optimizers whose step has begun, outermost first."""
        self._waiting: list[int | None] = []
        """Tokens of the step that is not counted yet, while UNDECIDED."""
        mine, parts = ref(self), {} if may_be_freed else {id(p): ref(p) for p in exchanged}

        def pre(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (hooks := mine()) is not None:
                hooks._begin(optimizer)
            elif parts and _holds_any(optimizer, parts):
                raise GaveUp(FREED)

        def post(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (hooks := mine()) is not None:
                hooks._end(optimizer)

        self._handles = [
            register_optimizer_step_pre_hook(_uncompiled(pre)),
            register_optimizer_step_post_hook(_uncompiled(post)),
        ]
        scaled_steps.listen(self)

    @property
    def in_step(self) -> bool:
        """Whether a step of the counted parameters has begun and not ended. Any thread."""
        return bool(self._inside)

    def count_by_hand(self) -> int | None:
        """Count calls of `runtime.step()` from now on. Returns the tokens of the uncounted step
        that this call stands for, if one waits.

        Raises UsageError where mend counts the steps of a given optimizer.
        """
        if self.counting is Counting.GIVEN:
            raise UsageError(
                "mend counts the optimizer's steps already; remove runtime.step(), or the optimizer"
            )
        self.counting = Counting.MANUAL
        return self._waiting.pop() if self._waiting else None

    def flush(self) -> None:
        """Count the step that waits, if there is one: `runtime.step()` was not called for it."""
        if self._waiting:
            self.counting = Counting.FOUND
            self._count(self._waiting.pop())

    def flush_last(self) -> None:
        """There will be no further step: count what other optimizers have changed since the last
        counted one (a discriminator that steps more often, an optimizer that steps after the
        counted one) as a step of its own. No capture would have it otherwise."""
        self.flush()
        if self._unfinished and self.counting in (Counting.GIVEN, Counting.FOUND):
            self._count(self._take_tokens())

    def close(self) -> None:
        """Stop counting. Idempotent."""
        scaled_steps.leave(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -------------------------------------------------------------- a step

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        holds = self._holds(optimizer)
        if not holds.counted:
            if holds.given:
                self._between()
            return
        if id(optimizer) in self._inside:  # its last step raised, so `_end` was not called
            del self._inside[self._inside.index(id(optimizer)) :]
        outermost = not self._inside
        self._inside.append(id(optimizer))
        if outermost:
            self.flush()
            if self.counting is not Counting.MANUAL:
                self._between()
            self._before()

    def skipped(self, optimizer: HoldsParameters) -> None:
        """A GradScaler has skipped a step: drop its tokens, unless another optimizer has changed
        its own part of the model by them."""
        held = {id(p) for p in held_by(optimizer)}
        if not (held.isdisjoint(self._counted or self._exchanged) or self._unfinished):
            self._take_tokens()

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        self.ends += 1
        idle = scaled_steps.changes_nothing(optimizer)
        if id(optimizer) not in self._inside:
            if not (self._inside or self._unfinished or idle):
                self._unfinished = self._holds(optimizer).exchanged
            return
        del self._inside[self._inside.index(id(optimizer)) :]
        if idle:
            self.skipped(optimizer)
        if idle or self._inside or self.counting is Counting.MANUAL:
            return
        if self.counting is not Counting.UNDECIDED:
            self._count(self._take_tokens())
        elif not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._counted = {id(p) for p in held_by(optimizer)}
            self._answers.clear()
            self._waiting = [self._take_tokens()]
            self._found(optimizer)

    def _count(self, tokens: int | None) -> None:
        self._unfinished = False
        self._after(tokens)

    def _holds(self, optimizer: torch.optim.Optimizer) -> _Holds:
        """Cached until the optimizer gets another group, as it may hold thousands of parameters."""
        groups = len(optimizer.param_groups)
        known = self._answers.get(optimizer)
        if known is None or known.groups != groups:
            held = {id(p) for p in held_by(optimizer)}
            counted = self._counted or self._exchanged
            known = _Holds(
                groups,
                counted=not held.isdisjoint(counted),
                given=not held.isdisjoint(self._given),
                exchanged=not held.isdisjoint(self._exchanged),
            )
            self._answers[optimizer] = known
        return known
