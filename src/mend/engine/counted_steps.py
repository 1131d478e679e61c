"""Does mend's work around each counted step of the inner optimizer. Training thread."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mend.coordination.ladder import taken_of
from mend.engine.hooks import signals
from mend.engine.hooks.step_hooks import Counting, HoldsParameters, StepHooks, held_by
from mend.engine.hooks.uncounted_writes import UncountedWrites
from mend.engine.state.outcome import Outcome
from mend.errors import UsageError
from mend.events.kinds import OptimizerFound
from mend.fragment.model_plan import ModelPlan
from mend.hardware.async_tp import AsyncTp
from mend.types import whole_number

if TYPE_CHECKING:
    from mend.engine.live_rank import LiveRank
    from mend.engine.local_only import LocalOnlyRank
    from mend.engine.rank_of_parts import RankOfParts


WHOLE_MAX = 2**40
"""Maximum tokens, or micro-batches, of one call. An offer sums those of all steps since the last
one, and the wire has room for 2^50."""

NOT_HELD = contextlib.nullcontext[None]()

NO_BACKWARD = -1
"""torch's graph task id in a thread that runs no backward pass."""


class CountedSteps:
    """Counts steps and tokens, and reports each step to the trainer. Does not keep the model
    alive."""

    def __init__(
        self,
        plan: ModelPlan,
        rank: LiveRank | RankOfParts | LocalOnlyRank,
        optimizers: Sequence[HoldsParameters],
        async_tp: AsyncTp,
    ) -> None:
        parameters = [*plan.parameters.values()]
        self._exchanged = len(plan.parameters)
        self._rank, self._trainer, self._async_tp = rank, rank.trainer, async_tp
        self._tokens: int | None = None
        self._ledger = rank.settings.ledger
        self._taken: int | None = None
        """Micro-batches of this step, if the script called `local_batch`."""
        self.borrowed = False
        """Whether the model holds the anchor, see `Runtime.anchor_weights`."""
        self.writes = UncountedWrites(plan.module, parameters, rank.recorder.note)
        self.writes.resumed = self._trainer.resumes
        self._hooks = StepHooks(
            parameters,
            optimizers,
            between=self._between,
            before=self._before,
            after=self._after,
            take_tokens=self._take_tokens,
            found=self._found,
            may_be_freed=not rank.exchanges,
        )
        rank.watch(self._look)

    def count_tokens(self, tokens: int) -> None:
        """Count tokens of the current step, its weight. Several calls add up."""
        tokens = whole("count_tokens", tokens, 0, "such as batch.numel()")
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def count_rows(self, rows: int) -> None:
        """Count rows of the current step. Several calls add up."""
        if self._ledger is None:
            raise UsageError("count_rows() without a data ledger: give mend_init(ledger=) one")
        self._ledger.count(whole("count_rows", rows, 0, "such as len(batch)"))

    def local_batch(self, count: int) -> int:
        """How many of `count` micro-batches this rank takes in the next step."""
        count = whole("local_batch", count, 1, "the micro-batches of a step")
        for part in self._rank.parts:
            part.trainer.clock.batch = count
        self._taken = taken_of(count, self._trainer.ladder.batch_pct)
        return self._taken

    def count_by_hand(self, tokens: int | None) -> None:
        """Count a step for a call of `Runtime.step`."""
        waiting = self._hooks.count_by_hand()
        if self._ledger is not None:
            self._ledger.unite()
        for more in (waiting, tokens):
            if more is not None:
                self.count_tokens(more)
        self._before()
        self._after(self._take_tokens())
        self._between()  # the call ends the step with everything that belongs to it

    @property
    def by_given_optimizer(self) -> bool:
        """Whether steps of the optimizer that mend_init was given are counted."""
        return self._hooks.counting is Counting.GIVEN

    def finish(self) -> Outcome | None:
        """Count a step that waits. Returns the outcome of a rack whose weights may not be
        overwritten; None: they may. From here on only mend writes to them. Raises what a step
        raises."""
        self.go_on()
        if self._ledger is not None:
            self._ledger.count(0)  # another optimizer's last step may be counted as one of its own
        self._hooks.flush_last()
        try:
            self._rank.before_capture()
        except UsageError as error:
            return Outcome("not-exchanged", str(error))
        weights = [state for part in self._rank.parts for state in part.trainer.weights]
        reason = self.writes.uncounted(weights)
        self.writes.close()
        return Outcome("uncounted", reason) if reason else None

    def refuse_borrowed(self, what: str) -> None:
        """Raise UsageError where the model holds the merged weights, and not those that train."""
        if self.borrowed:
            raise UsageError(f"{what} inside `with runtime.anchor_weights()`")

    def settle(self) -> None:
        """Count a step that waits, before a checkpoint. Raises UsageError where the model does not
        hold the weights that this rack trains."""
        self.refuse_borrowed("checkpoint()")
        self.writes.check_load()
        self.go_on()
        self._hooks.flush()

    def close(self) -> None:
        """Stop counting. Idempotent."""
        self._hooks.close()
        for part in self._rank.parts:
            for feature in part.trainer.features:
                feature.close()
        self.writes.close()

    def _look(self) -> None:
        """Look for uncounted writes; any thread, now and then. Not during a step: a long one
        (LBFGS, an optimizer on the host) writes many times before it is counted."""
        if not self._hooks.in_step:
            self.writes.look()

    # -------------------------------------------------------------- around a step

    def _take_tokens(self) -> int | None:
        tokens, self._tokens = self._tokens, None
        taken, self._taken = self._taken, None
        return tokens if tokens is not None else taken

    def _found(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer that trains the model, as none was given."""
        if self._ledger is not None:
            self._ledger.hold()  # this step is counted at the next one
        name, parameters = type(optimizer).__name__, len(held_by(optimizer))
        self._rank.recorder.note(OptimizerFound(name, parameters, self._exchanged))

    def _between(self) -> None:
        """Between two steps: copy the training state for a joining rack, if one waits."""
        self.go_on()
        if self._trainer.states.due is not None:
            self._rank.give_state()

    def go_on(self) -> None:
        """Finish the work of the last step, if a signal handler has interrupted it."""
        if self._rank.unfinished:
            with self.writes.aside():
                self._rank.go_on()

    def _before(self) -> None:
        self.go_on()
        self.writes.check_load()
        if (state := self._trainer.states.state) is not None:
            state.before_step()

    def _after(self, tokens: int | None) -> None:
        self.refuse_borrowed("a step")
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            raise UsageError(
                "the optimizer steps inside a backward pass, where mend can write no weights: give "
                "mend_init no optimizer, and call runtime.step() after each backward pass, from "
                "the first one on"
            )
        trainer = self._trainer
        if trainer.model.staging is not None and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "the optimizer's step is being captured into a CUDA graph, whose replays mend does "
                "not see: give mend_init no optimizer, and call runtime.step() after each step and "
                "each replay, from the first one on"
            )
        units = self._ledger.stepped() if self._ledger is not None else 0
        self.writes.stepped()
        # Between the count and the work no signal handler may raise: the work would never be done.
        # Steps without work do not hold handlers back, as that takes microseconds.
        due = trainer.due(trainer.step + 1)
        with signals.held() if due else NOT_HELD:
            if self._rank.stepped(1 if tokens is None else tokens, units):
                with self.writes.writing():
                    self._rank.after_step()
        if self._async_tp.asked:
            self._async_tp.stepped()
        for part in self._rank.parts:
            step, tokens, position = part.trainer.standing
            part.pace.stepped(step, tokens, position.stall_ns_total)


def whole(call: str, value: object, least: int, what: str) -> int:
    """`value` as an int. Raises UsageError unless it is a whole number from `least` to WHOLE_MAX.
    `call`, `what`: for the error text."""
    number = whole_number(value)
    if number is None or not least <= number <= WHOLE_MAX:
        bounds = f"at least {least} and at most 2^40"
        raise UsageError(f"{call}({value!r}): give it a whole number, {bounds}: {what}")
    return number
