"""What a script trains with besides the weights: its optimizers, and what it registers.

A rack that joins gets it from a donor, at one step of the donor's; a checkpoint keeps what was
registered. All of it travels as plain data (`plain_data`). Training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mend.consensus.records import TEXT_MAX
from mend.engine.digest import digest_of_state
from mend.engine.plain_data import Carried, Each, Packing, Path, check, said, unpack
from mend.engine.step_hooks import HoldsParameters, held_by
from mend.errors import StateRefused, UsageError
from mend.fragment.shards import as_dtensor
from mend.types import Member

Scope = Literal["job", "rack"]
SCOPES: tuple[Scope, ...] = ("job", "rack")
NAME_MAX = 64
OBJECTS_MAX = 256
DIFFERENCES_MAX = 8
"""Changed hyperparameters that are named; further ones are counted."""

ROOM_BYTES_MORE = 64 << 10
"""For numbers in the state that grow longer while memory for a copy of it is made ready."""

RACK_STATE_BYTES_MAX = 64 << 20
"""Of all that one rank has registered with scope rack, where it is mirrored."""

Note = Callable[[str, dict[str, object]], None]


class Stateful(Protocol):
    """What `register_state` takes."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """What a donor's rank had at one step. `data_B`: of the digest that it told. `shared`: all
    ranks of the rack get the same bytes, which only the first has pulled."""

    donor: int
    step: int
    digest: str
    data_B: Tensor
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Mirror:
    """What one rank of `owner` had registered with scope rack when it captured behind `step`.
    `round`: how many rounds were decided, of all fragments, with the one that merged the
    capture."""

    round: int
    owner: Member
    step: int
    size: int
    digest: str
    holder: int
    """The rack that keeps it."""


@dataclass(frozen=True, slots=True, eq=False)
class Mirrored:
    """A mirror with its bytes."""

    mirror: Mirror
    data_B: Tensor


@dataclass(frozen=True, slots=True)
class LikeFirst:
    """What a rank of a donor has is what its first rank has, to the bit: that one alone keeps a
    copy."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks of a donor that all hold everything (DDP). `minimum`: over them, element-wise."""

    first: bool
    minimum: Callable[[list[int]], list[int]]

    def alike(self, digest: str) -> bool:
        """Whether all ranks have this digest. All of them call it; empty: this one has none."""
        words = [int(digest[i : i + 8], 16) for i in range(0, 32, 8)] if digest else [-1] * 4
        agreed = self.minimum([*words, *(-word for word in words)])
        return bool(digest) and agreed == [*words, *(-word for word in words)]


Given = Tensor | LikeFirst | str
"""A copy of the training state, or that another rank has the same one, or why there is none."""


class TrainingState:
    """Of one rank. `names`: id of a parameter -> its name in the model."""

    def __init__(
        self,
        optimizers: Sequence[HoldsParameters],
        names: Mapping[int, str],
        note: Note,
        *,
        enabled: bool = True,
        mirrored: bool = False,
    ) -> None:
        """`enabled`: a rack that joins asks for a donor's state. `mirrored`: other racks keep what
        is of scope rack."""
        self.enabled, self.mirrored = enabled, mirrored
        self.optimizers = dict(zip(_titles(optimizers), optimizers, strict=True))
        self._names, self._note = names, note
        self._registered: dict[str, tuple[Stateful, Scope]] = {}
        self._begun = False
        self._waiting: dict[str, dict[str, Any]] = {scope: {} for scope in SCOPES}
        """Of a donor or a checkpoint, by scope and name: what waits to be registered here."""
        self._of: dict[str, str] = dict.fromkeys(SCOPES, "")
        """Where that comes from, for people."""
        self._fresh = ""
        """Why this rack's state is not that of a donor although it joins; empty: it is, or it
        does not join."""
        self._rack_fresh = "no rack was asked for it" if mirrored else "mirror_rack_state is off"
        """The same of what is of scope rack."""
        self._lost = False
        """A checkpoint has something of scope rack that is of no use here."""
        self._unmirrored = ""
        """Why it could not be mirrored the last time; empty: it could."""
        self.joins = self.copied = False
        self.account = ""
        """For the status: what became of it."""

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
        """What a donor or a checkpoint has of it; say so where there is nothing."""
        if name in self._waiting[scope]:
            _load(name, value, self._waiting[scope].pop(name))
            self._note("state-loaded", {"name": name, "scope": scope, "of": self._of[scope]})
            self._tell_of_rack(scope, f"rack state from {self._of[scope]}")
        elif self.joins or (self._lost and scope == "rack"):
            reason = self._fresh or f"{self._of[scope]} has registered no such name"
            if scope == "rack":
                reason = self._rack_fresh
                self._tell_of_rack(scope, f"rack state fresh: {reason}")
            self._note("state-fresh", {"name": name, "scope": scope, "reason": reason})

    def _tell_of_rack(self, scope: Scope, text: str) -> None:
        """For the status of a rack that joins."""
        if self.joins and scope == "rack" and text not in self.account:
            self.account += f"; {text}"

    def before_step(self) -> None:
        """Before the first own step. Raises UsageError where that would not go on with what the
        donor has."""
        if self._begun:
            return
        if self.copied:
            self._refuse_schedulers()
            self._tell_of_no_optimizer()
        self._begun = True
        for scope in SCOPES:
            if left := sorted(self._waiting[scope]):
                remedy = "call runtime.register_state with this name before the first step"
                about: dict[str, object] = {"names": left, "of": self._of[scope]}
                self._note("state-unclaimed", about | {"remedy": remedy})
        self._waiting = {scope: {} for scope in SCOPES}

    def _refuse_schedulers(self) -> None:
        """A scheduler that begins anew would set other learning rates than the donor has."""
        known = [each for value, _ in self._registered.values() for each in _drives(value)]
        for name, optimizer in self.optimizers.items():
            scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)  # type: ignore[attr-defined]
            if scheduled and not any(each is optimizer for each in known):
                raise UsageError(
                    f"a learning-rate scheduler drives {name}, and it is not registered: this rack "
                    f"joined with the state of {self._of['job']}, and the scheduler would begin "
                    "anew with other learning rates than the other racks have. Call "
                    "runtime.register_state('scheduler', scheduler) on every rack, right after "
                    "mend_init"
                )

    def _tell_of_no_optimizer(self) -> None:
        values = [value for value, _ in self._registered.values()]
        if not self.optimizers and not any(hasattr(value, "param_groups") for value in values):
            reason = "mend_init was given no optimizer, and none is registered"
            self.account += f"; the optimizer is fresh: {reason}"
            self._note("state-fresh", {"name": "optimizer", "reason": reason})

    # -------------------------------------------------------------- for a rack that joins

    def take(self, step: int, room_B: Tensor | None = None, each: Each | None = None) -> Tensor:
        """A copy of all that is of the job, as bytes, in `room_B` where it fits. Raises
        StateRefused."""
        packed = self._packed(step)
        return packed.write(room_B, each) if each is not None else packed.write(room_B)

    def room(self, step: int) -> int:
        """Bytes that a copy behind some later step takes at most, as far as can be known now.
        Raises StateRefused."""
        return self._packed(step).size + ROOM_BYTES_MORE

    def digest(self, step: int) -> LikeFirst:
        """Of what `take` would copy. Raises StateRefused."""
        packed = self._packed(step)
        return LikeFirst(packed.size, packed.digest())

    def _packed(self, step: int) -> Packing:
        states = {n: v.state_dict() for n, (v, scope) in self._registered.items() if scope == "job"}
        optimizers = {name: self._optimizer(name, of) for name, of in self.optimizers.items()}
        for name, value in states.items():
            check(name, value)  # named by itself
        return Packing("state", {"step": step, "optimizers": optimizers, "job": states})

    def load(self, found: Received) -> None:
        """Load the optimizers; the rest waits to be registered. Raises StateRefused, by name, where
        the optimizers here are made in another way."""
        value = unpack(f"the state of rack {found.donor}", found.data_B)
        theirs = value["optimizers"]
        if sorted(theirs) != sorted(self.optimizers):
            raise StateRefused(
                f"rack {found.donor} trains with {_listed(theirs)}, this rack with "
                f"{_listed(self.optimizers)}: give mend_init the same optimizers on every rack"
            )
        self._of["job"] = f"rack {found.donor}, step {found.step}"
        for name, optimizer in self.optimizers.items():
            changed = self._adopt(name, optimizer, theirs[name])
            if changed:
                more = {"and_more": len(changed) - DIFFERENCES_MAX}
                about: dict[str, object] = {"optimizer": name, "changed": changed[:DIFFERENCES_MAX]}
                self._note("made-equal", about | (more if len(changed) > DIFFERENCES_MAX else {}))
        self._waiting["job"], self.joins, self.copied = dict(value["job"]), True, True
        self.account = f"copied from rack {found.donor} at step {found.step}"
        about = {"donor": found.donor, "step": found.step, "digest": found.digest}
        listed = [*self.optimizers, *sorted(value["job"])]
        self._note("state-copied", {**about, "bytes": found.data_B.numel(), "of": listed})

    def why_not(self) -> str:
        """Why this rank asks for no copy."""
        mine = not self.enabled
        return "join_copies_state is off" if mine else "another rank of this rack asks for none"

    def begins_fresh(self, reason: str) -> None:
        """This rack joins, and has no donor's state."""
        self.joins, self._fresh, self.account = True, reason, f"fresh: {reason}"
        effect = "the optimizer and what is registered begin as this script made them"
        if where := self._of["job"]:
            self.account += f"; what is registered is that of {where}"
            effect = (
                "the optimizer begins as this script made it, what is registered as it is in "
                f"{where}"
            )
        self._note("state-fresh", {"name": "optimizer", "reason": reason, "effect": effect})

    def _optimizer(self, name: str, optimizer: HoldsParameters) -> dict[str, Any]:
        """Its state dict, and what must be alike where it is loaded."""
        if not hasattr(optimizer, "state_dict"):
            raise StateRefused(f"{name} ({type(optimizer).__name__}) has no state_dict")
        params = held_by(optimizer)
        return {
            "kind": _kind(optimizer),
            "parameters": [self._names.get(id(p), "") for p in params],
            "shapes": [list(_local(p).shape) for p in params],
            "state": optimizer.state_dict(),
        }

    def _adopt(self, name: str, optimizer: HoldsParameters, theirs: Any) -> list[str]:
        """Returns the hyperparameters that were otherwise, as text."""
        mine = self._optimizer(name, optimizer)
        for what in ("kind", "parameters", "shapes"):
            if theirs[what] != mine[what]:
                raise StateRefused(_difference(name, what, theirs[what], mine[what]))
        groups = theirs["state"].get("param_groups", [])
        own = mine["state"].get("param_groups", [])
        if [each.get("params") for each in groups] != [each.get("params") for each in own]:
            raise StateRefused(f"{name} has other parameter groups than the donor's")
        params = held_by(optimizer)
        state = _resolved((name, "state"), theirs["state"], params)
        changed = _changed(own, groups)
        optimizer.load_state_dict(state)  # type: ignore[attr-defined]
        if isinstance(optimizer, torch.optim.Optimizer):
            _set_exactly(optimizer, params, state["state"])
        loaded = optimizer.state_dict()  # type: ignore[attr-defined]
        if place := first_difference((name,), state, loaded):
            raise StateRefused(
                f"{said(place)} is not as it was at the donor once it is loaded: "
                f"{_kind(optimizer)}.load_state_dict changes it"
            )
        return changed

    # -------------------------------------------------------------- mirrors of scope rack

    def rack_state(self, step: int) -> Tensor | None:
        """What is registered with scope rack, as bytes, for another rack to keep. None: nothing is,
        or it cannot be mirrored, which is said when the reason is a new one."""
        if all(scope != "rack" for _, scope in self._registered.values()):
            return None
        why, found = "", None
        try:
            found = self._rack_packing(step).write()
        except StateRefused as error:
            why = str(error)
        except Exception as error:  # of the script's own state_dict; no memory for the copy
            why = f"{type(error).__name__}: {error}"
        if why and why != self._unmirrored:
            effect = "other racks keep what was mirrored before, if anything was"
            self._note("mirror-refused", {"step": step, "reason": why, "effect": effect})
        self._unmirrored = why
        return found

    def _rack_packing(self, step: int) -> Packing:
        """Raises StateRefused, by name, for what cannot travel and for too much."""
        found: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for name, (value, scope) in self._registered.items():
            if scope == "rack":
                found[name] = value.state_dict()
                sizes[name] = Packing(name, found[name]).size
        packed = Packing("rack", {"step": step, "rack": found})
        if packed.size > RACK_STATE_BYTES_MAX:
            largest = max(sizes, key=sizes.__getitem__)
            raise StateRefused(
                f"what is registered with scope rack has {packed.size} bytes, {sizes[largest]} of "
                f"them {largest!r}; at most {RACK_STATE_BYTES_MAX} are mirrored. Register less of "
                "it, or set mirror_rack_state=False on all racks"
            )
        return packed

    def load_rack(self, found: Mirrored) -> bool:
        """What another rack kept of a former life; it waits to be registered, and is newer than a
        checkpoint's. False: the bytes are none of `rack_state`, which is told."""
        mirror = found.mirror
        where = f"the mirror of step {mirror.step} on rack {mirror.holder}"
        try:
            value = unpack(where, found.data_B)
            states = dict(value["rack"])
        except (StateRefused, LookupError, TypeError, ValueError) as error:
            self.rack_begins_fresh(f"{where} cannot be read: {error}")
            return False
        self._waiting["rack"], self._of["rack"] = states, where
        self._rack_fresh = f"{where} has no such name"
        about = {"peer": mirror.holder, "step": mirror.step, "digest": mirror.digest}
        self._note("mirror-loaded", {**about, "bytes": mirror.size, "of": sorted(states)})
        return True

    def rack_begins_fresh(self, reason: str) -> None:
        """No other rack has it."""
        self._rack_fresh = reason

    # -------------------------------------------------------------- checkpoints

    def registered(self, step: int) -> Tensor | None:
        """What is registered, of both scopes, as bytes; None: nothing is. Raises StateRefused."""
        if not self._registered:
            return None
        found: dict[str, dict[str, Any]] = {scope: {} for scope in SCOPES}
        for name, (value, scope) in self._registered.items():
            found[scope][name] = value.state_dict()
        return Packing("registered", {"step": step, **found}).write()

    def resume(self, data_B: Tensor, where: str, lost: str = "") -> None:
        """What `registered` gave. Before a donor's state, if there is one. `lost`: why what is of
        scope rack, each rank's own, is of no use here; empty: it is."""
        value = unpack(where, data_B)
        self._waiting["job"], self._of["job"] = dict(value["job"]), where
        if lost:
            self._rack_fresh, self._lost = f"{where}: {lost}", True
        else:
            self._waiting["rack"], self._of["rack"] = dict(value["rack"]), where


# ------------------------------------------------------------------ for a rack that joins


class Lacks(IntEnum):
    """What a rank has yet to do for a rack that joins."""

    NOTHING = 0
    COPY = 1
    ROOM = 2
    """And memory for it has to be made ready first."""


def room_of(state: TrainingState, step: int) -> int:
    """Bytes of memory for a copy. 0: the script's own state_dict fails; the copy will say why."""
    try:
        return state.room(step)
    except Exception:
        return 0


def copy_state(
    state: TrainingState, step: int, replicas: Replicas | None, room_B: Tensor | None, each: Each
) -> Given:
    """Of `replicas` only the first makes the copy at once. The others digest what they have where
    it lies, and copy it only if it is not the same everywhere. `room_B`: memory for the copy."""
    take = partial(state.take, room_B=room_B, each=each)
    if replicas is None:
        return _or_why_not(lambda: take(step))
    found = _or_why_not(lambda: (take if replicas.first else state.digest)(step))
    digest = found.digest if isinstance(found, LikeFirst) else ""
    if isinstance(found, Tensor):
        digest = digest_of_state(found)
    if not replicas.alike(digest) and isinstance(found, LikeFirst):
        return _or_why_not(lambda: state.take(step))
    return found


def _or_why_not(take: Callable[[], Given]) -> Given:
    """Of what a script's own objects give."""
    try:
        return take()
    except StateRefused as error:
        return str(error)[:TEXT_MAX]
    except Exception as error:  # of the script's own state_dict; no memory for the copy
        return f"{type(error).__name__}: {error}"[:TEXT_MAX]


# ------------------------------------------------------------------ optimizers


def no_mirror(unheard: Sequence[int]) -> str:
    """Why there is none, as far as the racks that were asked have answered."""
    if not unheard:
        return "no rack that lives keeps a mirror of it"
    racks = ", ".join(map(str, unheard))
    return f"no rack that answered keeps a mirror of it; no answer from racks {racks}"


def _titles(optimizers: Sequence[object]) -> list[str]:
    if len(optimizers) < 2:
        return ["optimizer"] * len(optimizers)
    return [f"optimizer {number}" for number in range(len(optimizers))]


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"


def _local(tensor: Tensor) -> Tensor:
    spread = as_dtensor(tensor)
    return tensor if spread is None else spread.to_local()


def _difference(name: str, what: str, there: Any, here: Any) -> str:
    if what == "kind":
        return f"{name} is a {there} at the donor and a {here} here; make the same on every rack"
    if len(there) != len(here):
        return f"{name} holds {len(there)} parameters at the donor and {len(here)} here"
    i = next(i for i in range(len(here)) if there[i] != here[i])
    return f"parameter {i} of {name}: {what} {there[i]} at the donor, {here[i]} here"


def _changed(own: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for number, (mine, other) in enumerate(zip(own, theirs, strict=True)):
        for key in sorted({*mine, *other}):
            here, there = _shown(mine.get(key)), _shown(other.get(key))
            if here != there:
                found.append(f"group {number} {key}: {here} -> {there}")
    return found


def _shown(value: object) -> str:
    if isinstance(value, Carried):
        value = value.tensor
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def _resolved(path: Path, value: Any, params: Sequence[Tensor]) -> Any:
    """Tensors where they belong: on the device of the parameter they are of, or on the CPU."""
    if isinstance(value, Carried):
        return _placed(path, value, params)
    if isinstance(value, dict):
        made = type(value)()
        for key, each in value.items():
            made[key] = _resolved((*path, key), each, params)
        return made
    if isinstance(value, list | tuple):
        return type(value)(_resolved((*path, i), each, params) for i, each in enumerate(value))
    return value


def _placed(path: Path, value: Carried, params: Sequence[Tensor]) -> Tensor:
    """path: name, "state", "state", number of the parameter, ...; else of no parameter."""
    index = path[3] if len(path) > 3 and path[2] == "state" else None
    like = params[index] if isinstance(index, int) and 0 <= index < len(params) else None
    on_cpu = value.device == "cpu"
    device = torch.device("cpu") if on_cpu else like.device if like is not None else None
    # A copy: the memory of what was received is freed.
    tensor = value.tensor.clone() if device is None or on_cpu else value.tensor.to(device)
    if device is None:
        tensor = tensor.to(value.device)
    if not value.placements:
        return tensor
    spread = as_dtensor(like) if like is not None else None
    if spread is None or str(spread.placements) != value.placements:
        has = "not sharded" if spread is None else str(spread.placements)
        raise StateRefused(
            f"{said(path)} is sharded as {value.placements} at the donor, {has} here"
        )
    whole = torch.Size(value.shape)
    stride = torch.empty(whole, device="meta").stride()
    return type(spread).from_local(
        tensor, spread.device_mesh, spread.placements, run_check=False, shape=whole, stride=stride
    )


def _set_exactly(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], state: Mapping[Any, Any]
) -> None:
    """`load_state_dict` casts to the type of the parameter, and some keep wider state than that; of
    a string it makes another one."""
    for index, values in state.items():
        if not isinstance(index, int) or not isinstance(values, dict):
            continue
        optimizer.state[params[index]].update(values)


def first_difference(path: Path, one: Any, other: Any) -> Path:
    """The first place where two state dicts are not equal, to the bit; empty: there is none."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        same = isinstance(one, Tensor) and isinstance(other, Tensor) and _equal(one, other)
        return () if same else path
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return (*path, next(iter(one.keys() ^ other.keys())))
        each = ((key, one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple) and type(one) is type(other):
        if len(one) != len(other):
            return path
        each = ((i, one[i], other[i]) for i in range(len(one)))
    else:
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return () if same else path
    found = (first_difference((*path, key), a, b) for key, a, b in each)
    return next((place for place in found if place), ())


def _equal(one: Tensor, other: Tensor) -> bool:
    one, other = _local(one).detach(), _local(other).detach()
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not one.numel():
        return True
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8).cpu(),
        other.contiguous().reshape(-1).view(torch.uint8).cpu(),
    )


# ------------------------------------------------------------------ registered objects


def _drives(value: object) -> list[object]:
    """The optimizers that a registered object refers to, itself or by what it holds."""
    held = [value, *getattr(value, "__dict__", {}).values()]
    return [getattr(each, "optimizer", None) for each in held]


def _load(name: str, value: Stateful, state: Any) -> None:
    try:
        value.load_state_dict(_resolved((name,), state, ()))
    except Exception as error:
        raise StateRefused(
            f"{name}: {type(value).__name__}.load_state_dict does not take what was saved of it: "
            f"{error!r}"
        ) from error
