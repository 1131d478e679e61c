"""The training state besides the weights: optimizers, and the objects that a script registers.

A joining rack gets it from a donor, at one step of the donor's. A checkpoint keeps the registered
objects. All of it travels as plain data (`plain_data`). Training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor

from mend.consensus.records import TEXT_MAX
from mend.engine.compute.digest import digest_of_state
from mend.engine.hooks.schedulers import is_scheduled, rates_of, schedulers_of
from mend.engine.hooks.step_hooks import HoldsParameters
from mend.engine.joining.optimizer_state import adopt, portable, resolved
from mend.engine.joining.plain_data import Each, Packing, check, one_by_one, unpack
from mend.errors import StateRefused, UsageError, format_error
from mend.events.base import Emit
from mend.events.kinds import (
    MirrorLoaded,
    MirrorRefused,
    OptimizerMadeEqual,
    RatesDiffer,
    SchedulerRefused,
    SchedulerRegistered,
    StateFresh,
    StateLoaded,
    StateUnclaimed,
    TrainingStateCopied,
)
from mend.step_counters import StepCounter
from mend.types import Member

Scope = Literal["job", "rack"]
SCOPES: tuple[Scope, ...] = ("job", "rack")
NAME_MAX = 64
OBJECTS_MAX = 256
DIFFERENCES_MAX = 8
"""Changed hyperparameters that are named; more are counted."""

ROOM_BYTES_MORE = 64 << 10
"""Spare room for numbers in the state that get longer while memory for a copy is prepared."""

RACK_STATE_BYTES_MAX = 64 << 20
"""Maximum size of one rank's state of scope rack, where it is mirrored."""


class Stateful(Protocol):
    """An object for `register_state`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedState:
    """The training state of a donor's rank at one step. `digest`: that of `data_B` at the donor.
    `shared`: all ranks of the rack get the same bytes, which only the first has pulled."""

    donor: int
    step: int
    digest: str
    data_B: Tensor
    shared: bool = False


@dataclass(frozen=True, slots=True)
class StateUnavailable:
    """Why there is no donor's training state. `step`: the step of the job, to go on from without
    it; 0: the rack begins at its own first step."""

    reason: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class Mirror:
    """A rank's state of scope rack when it captured after `step`. `round`: number of decided
    rounds, of all fragments, including the round that merged the capture."""

    round: int
    owner: Member
    step: int
    size: int
    digest: str
    holder: int
    """The rack that keeps it."""


@dataclass(frozen=True, slots=True)
class MirrorCalls:
    """Methods of `RackStateMirrors`, to be called from the training thread: the loop runs them
    soon; all return at once."""

    serve: Callable[[int, Tensor], None]
    seek: Callable[[], None]
    fetch: Callable[[Mirror], None]


@dataclass(frozen=True, slots=True, eq=False)
class Mirrored:
    """A mirror with its bytes."""

    mirror: Mirror
    data_B: Tensor


@dataclass(frozen=True, slots=True)
class LikeFirst:
    """The state of a donor's rank equals that of its first rank, which alone keeps a copy."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks of a donor that all hold everything (DDP). `minimum`: over them, element-wise."""

    first: bool
    minimum: Callable[[list[int]], list[int]]

    def alike(self, digest: str) -> bool:
        """Whether all ranks have this digest. Collective. Empty: this rank has none."""
        words = [int(digest[i : i + 8], 16) for i in range(0, 32, 8)] if digest else [-1] * 4
        agreed = self.minimum([*words, *(-word for word in words)])
        return bool(digest) and agreed == [*words, *(-word for word in words)]


@dataclass(frozen=True, slots=True)
class StateRoutes:
    """The training state of a rank, and the calls by which it reaches racks that join. All of them
    return at once."""

    state: TrainingState | None = None
    """None: a rack that joins gets nothing besides anchors."""
    give: Callable[[Member, int, Given], None] = lambda *_: None
    """Hands the copy of the training state at a step to the loop."""
    reserve: Callable[[int], None] | None = None
    """Prepares this many bytes for a copy of the training state; None: the copy takes fresh memory,
    whose first touch costs more than the copying."""
    replicas: Replicas | None = None
    """Set where every rank of this rack holds the whole model."""
    mirrors: MirrorCalls | None = None
    """Set where racks keep state of scope rack for each other."""


Given = Tensor | LikeFirst | str
"""A copy of the training state, a reference to the first rank's copy, or why there is none."""


class TrainingState:
    """The training state of one rank. `names`: id of a parameter -> its name in the model."""

    def __init__(
        self,
        optimizers: Sequence[HoldsParameters],
        names: Mapping[int, str],
        note: Emit,
        *,
        enabled: bool = True,
        mirrored: bool = False,
    ) -> None:
        """`enabled`: a joining rack asks for a donor's state. `mirrored`: other racks keep the
        state of scope rack."""
        self.enabled, self.mirrored = enabled, mirrored
        self.optimizers = dict(zip(_titles(optimizers), optimizers, strict=True))
        self._names, self._note = names, note
        self._registered: dict[str, tuple[Stateful, Scope]] = {}
        self._begun = False
        self._waiting: dict[str, dict[str, Any]] = {scope: {} for scope in SCOPES}
        """scope -> name -> state dict of a donor, a mirror or a checkpoint, until the object of
        this name is registered."""
        self._of: dict[str, str] = dict.fromkeys(SCOPES, "")
        """scope -> the source of these state dicts, in words."""
        self._rates: dict[str, list[float]] = {}
        """The learning rates in the checkpoint that is resumed."""
        self._answered = set[str]()
        """Registered names of which it was noted whether a state was loaded."""
        self._fresh = ""
        """Why this rack joins without a donor's state; empty: it has one, or does not join."""
        self._rack_fresh = "no rack was asked for it" if mirrored else "mirror_rack_state is off"
        """Why there is no former state of scope rack."""
        self._lost = False
        """Whether a checkpoint has state of scope rack that cannot be used here."""
        self._unmirrored = ""
        """Why the state could not be mirrored the last time; empty: it could."""
        self.joins = self.copied = False
        self.account = ""
        """How a joining rack got its state, in words, for the status."""

    # -------------------------------------------------------------- registering

    def register(self, name: str, value: Stateful, scope: str) -> None:
        """See `Runtime.register_state`."""
        if self._begun:
            raise UsageError(f"register_state({name!r}) after a step; call it before the first one")
        if not 0 < len(name) <= NAME_MAX:
            raise UsageError(f"register_state({name!r}): a name of 1 to {NAME_MAX} characters")
        if scope not in SCOPES:
            raise UsageError(f"register_state({name!r}, scope={scope!r}): one of {SCOPES}")
        if name in self._registered or len(self._registered) >= OBJECTS_MAX:
            why = "is taken" if name in self._registered else f"is one of more than {OBJECTS_MAX}"
            raise UsageError(f"register_state({name!r}): the name {why}")
        missing = [m for m in ("state_dict", "load_state_dict") if not hasattr(value, m)]
        if missing:
            raise UsageError(
                f"register_state({name!r}): {type(value).__name__} has no {missing[0]}"
            )
        check(name, value.state_dict())
        self._registered[name] = (value, scope)
        if self.mirrored and scope == "rack":
            self._rack_packing(0)
        self._restore(name, value, scope)

    def _restore(self, name: str, value: Stateful, scope: Scope) -> None:
        """Load the state of this object that a donor, a mirror or a checkpoint has; note it if
        there is none."""
        if name in self._waiting[scope]:
            _load(name, value, self._waiting[scope].pop(name))
            self._answered.add(name)
            self._note(StateLoaded(name, scope, self._of[scope]))
            self._tell_of_rack(scope, f"rack state from {self._of[scope]}")
        elif self.joins or (self._lost and scope == "rack"):
            reason = self._fresh or f"{self._of[scope]} has registered no such name"
            if scope == "rack":
                reason = self._rack_fresh
                self._tell_of_rack(scope, f"rack state fresh: {reason}")
            self._answered.add(name)
            self._note(StateFresh(name=name, scope=scope, reason=reason))

    def _tell_of_rack(self, scope: Scope, text: str) -> None:
        """Add `text` to the account of a joining rack."""
        if self.joins and scope == "rack" and text not in self.account:
            self.account += f"; {text}"

    def meet(self, counter: StepCounter, began: int) -> bool:
        """Register `counter` before its first step, unless it, or an object with it as an
        attribute, is registered. Returns False if it is too late for that.

        `began`: the step of the job at which this rank began. Raises UsageError where that is a
        later one than the first, and the count is 0: it would do its first steps again.
        """
        name = next((n for n, (v, _) in self._registered.items() if _refers_to(v, counter)), "")
        if not name:
            if self._begun:
                return False
            name = self._free_name("trainer")
            lacking = self.copied and name not in self._waiting["job"]
            if counter.steps or not lacking:
                self.register(name, counter, "job")
        if began and not counter.steps and name not in self._answered:
            left = sorted({*self._waiting["job"], *self._waiting["rack"]})
            other = f"; register it under its name if it is one of {left}" if left else ""
            raise UsageError(
                f"{type(counter).__name__}.steps=0, and this rank goes on after step {began}; "
                f"{self._of['job'] or 'the checkpoint'} has no state {name!r}. Dropout would "
                f"repeat the masks of the first steps. Set steps={began}, or what it has "
                f"made, before its next step{other}"
            )
        return True

    def _free_name(self, name: str) -> str:
        """`name`, or the first of "name 2", "name 3", ... that is not registered."""
        names = (name if number == 1 else f"{name} {number}" for number in range(1, OBJECTS_MAX))
        return next(each for each in names if each not in self._registered)

    def before_step(self) -> None:
        """Call it before each step. Raises UsageError before the first one if training would not
        continue as at the donor."""
        if self._begun:
            return
        self._register_schedulers()
        self._compare_rates()
        if self.copied:
            self._refuse_schedulers()
            self._tell_of_no_optimizer()
        self._begun = True
        for scope in SCOPES:
            if left := sorted(self._waiting[scope]):
                self._note(StateUnclaimed(tuple(left), self._of[scope]))
        self._waiting = {scope: {} for scope in SCOPES}

    def _unregistered(self) -> list[str]:
        """The optimizers that a scheduler drives which is not registered."""
        driven = [item for value, _ in self._registered.values() for item in _optimizers_in(value)]
        return [
            name
            for name, optimizer in self.optimizers.items()
            if is_scheduled(optimizer) and not any(item is optimizer for item in driven)
        ]

    def _register_schedulers(self) -> None:
        """Register the scheduler of each optimizer, if the script has not. A scheduler that begins
        anew on a resume sets other learning rates than before, which is easily overlooked."""
        for name in self._unregistered():
            found = schedulers_of(self.optimizers[name])
            title = f"scheduler of {name}"
            if len(found) != 1 or (self.copied and title not in self._waiting["job"]):
                continue  # ambiguous, or the donor has no state of it: `_refuse_schedulers`
            try:
                self.register(title, found[0], "job")
            except StateRefused as error:
                self._note(SchedulerRefused(title, type(found[0]).__name__, str(error)))
            else:
                self._note(SchedulerRegistered(title, type(found[0]).__name__))

    def _compare_rates(self) -> None:
        """Warn where the learning rates of a resumed rack are not those of its checkpoint."""
        for name, now in rates_of(self.optimizers).items():
            then = self._rates.get(name, now)
            if now != then and not self.joins:
                self._note(RatesDiffer(name, tuple(then), tuple(now)))

    def _refuse_schedulers(self) -> None:
        """Refuse a scheduler that is not registered: it would begin anew, and set other learning
        rates than the donor has."""
        for name in self._unregistered():
            raise UsageError(
                f"a learning-rate scheduler drives {name}, and it is not registered: this rack "
                f"joined with the state of {self._of['job']}, and the scheduler would begin anew "
                "with other learning rates than the other racks have. Call "
                "runtime.register_state('scheduler', scheduler) on every rack, right after "
                "mend_init"
            )

    def _tell_of_no_optimizer(self) -> None:
        values = [value for value, _ in self._registered.values()]
        if not self.optimizers and not any(hasattr(value, "param_groups") for value in values):
            reason = "mend_init was given no optimizer, and none is registered"
            self.account += f"; the optimizer is fresh: {reason}"
            self._note(StateFresh(name="optimizer", reason=reason))

    # -------------------------------------------------------------- for a rack that joins

    def take(self, step: int, room_B: Tensor | None = None, each: Each = one_by_one) -> Tensor:
        """A copy of the optimizers and the state of scope job (uint8), in `room_B` if it fits.
        Raises StateRefused."""
        return self._packed(step).write(room_B, each)

    def room(self, step: int) -> int:
        """Maximum size of a copy after a later step, as far as it is known now. Raises
        StateRefused."""
        return self._packed(step).size + ROOM_BYTES_MORE

    def digest(self, step: int) -> LikeFirst:
        """Size and digest of the copy that `take` would make. Raises StateRefused."""
        packed = self._packed(step)
        return LikeFirst(packed.size, packed.digest())

    def _states(self, scope: Scope) -> dict[str, Any]:
        """State dicts of the registered objects of this scope, by name."""
        return {n: value.state_dict() for n, (value, of) in self._registered.items() if of == scope}

    def _packed(self, step: int) -> Packing:
        states = self._states("job")
        optimizers = {name: portable(name, of, self._names) for name, of in self.optimizers.items()}
        for name, value in states.items():
            check(name, value)  # so that an error names the object
        return Packing("state", {"step": step, "optimizers": optimizers, "job": states})

    def load(self, copied: ReceivedState) -> None:
        """Load the optimizers; keep the rest until it is registered. Raises StateRefused, by name,
        where the optimizers differ from the donor's."""
        value = unpack(f"the state of rack {copied.donor}", copied.data_B)
        states = value["optimizers"]
        if sorted(states) != sorted(self.optimizers):
            raise StateRefused(
                f"rack {copied.donor} trains with {_listed(states)}, this rack with "
                f"{_listed(self.optimizers)}: give mend_init the same optimizers on every rack"
            )
        self._of["job"] = f"rack {copied.donor}, step {copied.step}"
        for name, optimizer in self.optimizers.items():
            changed = adopt(name, optimizer, self._names, states[name])
            if changed:
                few, more = tuple(changed[:DIFFERENCES_MAX]), max(0, len(changed) - DIFFERENCES_MAX)
                self._note(OptimizerMadeEqual(name, few, more))
        self._waiting["job"], self.joins, self.copied = dict(value["job"]), True, True
        self.account = f"copied from rack {copied.donor} at step {copied.step}"
        listed = (*self.optimizers, *sorted(value["job"]))
        about = (copied.donor, copied.step, copied.digest, copied.data_B.numel())
        self._note(TrainingStateCopied(*about, listed))

    def why_not(self) -> str:
        """Why this rack asks for no copy."""
        if not self.enabled:
            return "join_copies_state is off"
        return "another rank of this rack asks for none"

    def begins_fresh(self, reason: str) -> None:
        """Note that this rack joins without a donor's state."""
        self.joins, self._fresh, self.account = True, reason, f"fresh: {reason}"
        effect = "the optimizer and what is registered begin as this script made them"
        if where := self._of["job"]:
            self.account += f"; what is registered is that of {where}"
            effect = (
                "the optimizer begins as this script made it, what is registered as it is in "
                f"{where}"
            )
        self._note(StateFresh(name="optimizer", reason=reason, effect=effect))

    # -------------------------------------------------------------- mirrors of scope rack

    def rack_state(self, step: int) -> Tensor | None:
        """The state of scope rack, as bytes, for another rack to keep. None: there is none, or it
        cannot be mirrored; a new reason is noted."""
        if all(scope != "rack" for _, scope in self._registered.values()):
            return None
        why, data_B = "", None
        try:
            data_B = self._rack_packing(step).write()
        except StateRefused as error:
            why = str(error)
        except Exception as error:  # of the script's own state_dict; no memory for the copy
            why = format_error(error)
        if why and why != self._unmirrored:
            self._note(MirrorRefused(step, why))
        self._unmirrored = why
        return data_B

    def _rack_packing(self, step: int) -> Packing:
        """Raises StateRefused, by name, for a value that cannot be packed or too many bytes."""
        states = self._states("rack")
        sizes = {name: Packing(name, state).size for name, state in states.items()}
        packed = Packing("rack", {"step": step, "rack": states})
        if packed.size > RACK_STATE_BYTES_MAX:
            largest = max(sizes, key=sizes.__getitem__)
            raise StateRefused(
                f"what is registered with scope rack has {packed.size} bytes, {sizes[largest]} of "
                f"them {largest!r}; at most {RACK_STATE_BYTES_MAX} are mirrored. Register less of "
                "it, or set mirror_rack_state=False on all racks"
            )
        return packed

    def load_rack(self, mirrored: Mirrored) -> bool:
        """Keep a former life's state of scope rack until the objects are registered, in place of an
        older one of a checkpoint. Returns False for bytes that cannot be read; the reason is
        remembered."""
        mirror = mirrored.mirror
        where = f"the mirror of step {mirror.step} on rack {mirror.holder}"
        try:
            value = unpack(where, mirrored.data_B)
            states = dict(value["rack"])
        except (StateRefused, LookupError, TypeError, ValueError) as error:
            self.rack_begins_fresh(f"{where} cannot be read: {error}")
            return False
        self._waiting["rack"], self._of["rack"] = states, where
        self._rack_fresh = f"{where} has no such name"
        about = (mirror.holder, mirror.step, mirror.digest, mirror.size)
        self._note(MirrorLoaded(*about, tuple(sorted(states))))
        return True

    def rack_begins_fresh(self, reason: str) -> None:
        """Remember why there is no former state of scope rack."""
        self._rack_fresh = reason

    # -------------------------------------------------------------- checkpoints

    def registered(self, step: int) -> Tensor | None:
        """The registered objects of both scopes and the learning rates (uint8), for a checkpoint;
        None: there is nothing to keep. Raises StateRefused."""
        rates = rates_of(self.optimizers)
        if not self._registered and not rates:
            return None
        states: dict[str, Any] = {scope: self._states(scope) for scope in SCOPES}
        states["rates"] = rates
        return Packing("registered", {"step": step, **states}).write()

    def resume(self, data_B: Tensor, where: str, lost: str = "") -> None:
        """Keep what `registered` returned until the objects are registered. Call it before `load`.
        `lost`: why the state of scope rack cannot be used here; empty: it can."""
        value = unpack(where, data_B)
        self._rates = dict(value.get("rates", {}))
        self._waiting["job"], self._of["job"] = dict(value["job"]), where
        if lost:
            self._rack_fresh, self._lost = f"{where}: {lost}", True
        else:
            self._waiting["rack"], self._of["rack"] = dict(value["rack"]), where


# ------------------------------------------------------------------ copies for a joining rack


class Lacks(IntEnum):
    """What a rank still has to do for a joining rack."""

    NOTHING = 0
    COPY = 1
    ROOM = 2
    """Prepare memory, then copy."""


def room_of(state: TrainingState, step: int) -> int:
    """Size of the memory for a copy. 0: a `state_dict` of the script fails; `copy_state` will say
    why."""
    try:
        return state.room(step)
    except Exception:
        return 0


def copy_state(
    state: TrainingState, step: int, replicas: Replicas | None, room_B: Tensor | None, each: Each
) -> Given:
    """Copy the training state. Among `replicas` only the first copies at once. The others digest
    their state in place, and copy it only if it differs. `room_B`: memory for the copy."""
    take = partial(state.take, room_B=room_B, each=each)
    if replicas is None:
        return _or_why_not(lambda: take(step))
    given = _or_why_not(lambda: (take if replicas.first else state.digest)(step))
    digest = given.digest if isinstance(given, LikeFirst) else ""
    if isinstance(given, Tensor):
        digest = digest_of_state(given)
    if not replicas.alike(digest) and isinstance(given, LikeFirst):
        return _or_why_not(lambda: state.take(step))
    return given


def _or_why_not(take: Callable[[], Given]) -> Given:
    """The result of `take`, or its error in words."""
    try:
        return take()
    except StateRefused as error:
        return str(error)[:TEXT_MAX]
    except Exception as error:  # of the script's own state_dict; no memory for the copy
        return format_error(error)[:TEXT_MAX]


def no_mirror(unheard: Sequence[int]) -> str:
    """Why there is no mirror, by the answers of the racks so far."""
    if not unheard:
        return "no rack that lives keeps a mirror of it"
    racks = ", ".join(map(str, unheard))
    return f"no rack that answered keeps a mirror of it; no answer from racks {racks}"


def _titles(optimizers: Sequence[object]) -> list[str]:
    if len(optimizers) < 2:
        return ["optimizer"] * len(optimizers)
    return [f"optimizer {number}" for number in range(len(optimizers))]


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"


# ------------------------------------------------------------------ registered objects


def _optimizers_in(value: object) -> list[object]:
    """The optimizers that a registered object, or one of its attributes, refers to."""
    held = [value, *getattr(value, "__dict__", {}).values()]
    return [getattr(item, "optimizer", None) for item in held]


def _refers_to(value: object, counter: object) -> bool:
    return any(item is counter for item in (value, *getattr(value, "__dict__", {}).values()))


def _load(name: str, value: Stateful, state: Any) -> None:
    try:
        value.load_state_dict(resolved((name,), state, ()))
    except Exception as error:
        raise StateRefused(
            f"{name}: {type(value).__name__}.load_state_dict does not take what was saved of it: "
            f"{error!r}"
        ) from error
