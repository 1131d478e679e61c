"""Writes and reads one rack's part of a checkpoint, with all ranks of the rack together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mend.consensus.records import CheckpointRecord, Units
from mend.coordination.messages import Resume
from mend.coordination.validation import differing
from mend.engine.checkpoint.checkpoint_files import (
    File,
    Manifest,
    State,
    check_files,
    end_part,
    files_in,
    newest_checkpoint,
    rack_folder,
    rank_file,
    read_manifest,
    read_rank,
    refuse_taken_names,
    registered_file,
    summed,
    write_rank,
    write_whole,
)
from mend.engine.checkpoint.recut import Recut
from mend.engine.compute.digest import bytes_of, digest_of
from mend.engine.compute.numerics import Numerics
from mend.engine.features.data_ledger import DataUnits
from mend.engine.io.rack import RackGroup
from mend.engine.joining.training_state import TrainingState
from mend.engine.state.fragment_state import FragmentState, OfferProgress, OpenOffer, RankProgress
from mend.engine.trainer.trainer import Trainer
from mend.errors import CheckpointError, StateRefused, format_error
from mend.fragment.device import on_host
from mend.fragment.plan import PLACED
from mend.fragment.shards import by_rows
from mend.types import VERSION, Layout

T = TypeVar("T")

FROZEN_FACT = "frozen parameters"
"""The fact that is compared later than the others, in `RackCheckpoint.compared`, where another
number of ranks wrote shards."""

Facts = Sequence[tuple[str, str]]


def together(group: RackGroup, job: Callable[[], T], where: str = "") -> T:
    """Do `job` on every rank of the rack and return its result. If it fails on one, all raise: that
    rank its own exception (CheckpointError for an OSError), the others CheckpointError. `where`:
    prefix for an OSError that names no file, such as that of a full disk."""
    failure: BaseException | None = None
    try:
        result = job()
    except BaseException as error:  # also Ctrl-C: the others wait in the gather below
        failure = error
    text = format_error(failure)
    if isinstance(failure, OSError):
        text = f"{failure.filename}: {failure.strerror}" if failure.filename else where + text
    texts = group.gather(text, str)
    if isinstance(failure, OSError):
        raise CheckpointError(text) from failure
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise CheckpointError(f"rank {rank} of this rack: {text}")
    return result


# ------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True)
class Taken:
    """One rank's part of a checkpoint, as of one moment between two steps. It does not change
    later: anchors are never written to, nor are open offers once they are encoded (see
    `CheckpointBarrier.await_encoded`); the rest is copied."""

    progress: RankProgress
    offers: tuple[OpenOffer, ...]
    tensors: Mapping[str, Tensor]
    registered: Tensor | None
    """The registered objects, as bytes."""
    weights: int
    """Number of fragments of weights, the first ones."""
    units: Units | None = None
    """Units of data at the record of the checkpoint."""

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(each.version for each in self.progress.fragments)


def take(trainer: Trainer) -> Taken:
    """Take this rank's part. Training thread, after `CheckpointBarrier.cut`. Raises
    StateRefused."""
    progress, offers = trainer.state()
    tensors = {}
    for fragment, state in enumerate(trainer.fragment_states):
        tensors[f"{fragment}.anchor"] = state.anchor.data
        if state.residual_N is not None:
            tensors[f"{fragment}.residual"] = state.residual_N
    for offer in offers:
        tensors[f"{offer.fragment}.delta"] = offer.delta_N
    training_state = trainer.states.state
    registered = training_state.registered(trainer.step) if training_state is not None else None
    units = trainer.published.of(DataUnits).marked
    return Taken(progress, tuple(offers), tensors, registered, len(trainer.weights), units)


def write_part(
    group: RackGroup, rack: int, facts: Facts, part: Path, mark: CheckpointRecord, taken: Taken
) -> None:
    """Write into the folder `part`, then rename it to its final name. All ranks together. `facts`:
    of the plan. Other files in the folder become a part of the checkpoint."""
    leads = group.rank == 0
    together(group, lambda: refuse_taken_names(part, group.ranks) if leads else None)
    together(group, lambda: _write_rank(part, group.rank, taken), f"{part}: ")
    listed = together(group, lambda: files_in(part) if leads else [])
    names = group.gather(listed, list[str])[0]
    own = together(group, lambda: summed(part, names[group.rank :: group.ranks], sync=True))
    files = [file for files in group.gather(own, list[File]) for file in files]
    manifest = manifest_of(group, rack, facts, mark, taken, files)
    together(group, lambda: end_part(part, manifest) if leads else None)


def state_of(taken: Taken) -> State:
    """The part of `taken` that is not tensors."""
    open_ = tuple(
        OfferProgress(
            o.fragment, o.seq, o.anchor.version, o.capture_step, o.tokens, o.steps,
            o.tokens_total, o.steps_total, o.units_total,
        )
        for o in taken.offers
    )  # fmt: skip
    return State(taken.progress, open_)


def _write_rank(part: Path, rank: int, taken: Taken) -> None:
    tensors = {name: on_host(values_N) for name, values_N in taken.tensors.items()}
    write_rank(part / rank_file(rank), state_of(taken), tensors)
    if taken.registered is not None:
        write_whole(part / registered_file(rank), bytes_of(taken.registered))


def manifest_of(
    group: RackGroup,
    rack: int,
    facts: Facts,
    mark: CheckpointRecord,
    taken: Taken,
    files: Sequence[File],
) -> Manifest:
    """The rack's manifest, the same on all ranks. All ranks together."""
    ranks = group.gather(taken.progress, RankProgress)
    first, weights = ranks[0], taken.weights
    open_tokens = sum(
        rank.tokens - each.tokens_mark for rank in ranks for each in rank.fragments[:weights]
    ) / (weights or 1)
    return Manifest(
        mend=VERSION,
        name=mark.name,
        lineage=mark.lineage,
        number=mark.number,
        racks=mark.racks,
        rack=rack,
        ranks=len(ranks),
        wall_ns=time.time_ns(),
        step=first.step,
        open_tokens=open_tokens,
        versions=tuple(each.version for each in first.fragments),
        rounds=tuple(each.rounds for each in first.fragments),
        digests=tuple(
            tuple(rank.fragments[p].digest for rank in ranks) for p in range(len(first.fragments))
        ),
        facts=tuple(facts),
        files=tuple(sorted(files, key=lambda file: file.name)),
        units=taken.units,
    )


# ------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class RackCheckpoint:
    """One rank's part of a checkpoint, as read."""

    folder: Path
    manifest: Manifest
    state: State
    tensors: Mapping[str, Tensor]
    registered_B: Tensor | None = None
    """The registered objects, as bytes."""
    recut: Recut | None = None
    """Set where another number of ranks wrote the checkpoint."""
    weights_then: tuple[tuple[str, ...], ...] = ()
    """Digests of the saved weights, per old rank and fragment."""
    weights_now: tuple[tuple[str, ...], ...] = ()
    """Digests of the model's weights, likewise; set where `recut` is of shards."""

    @property
    def resume(self) -> Resume:
        """What the rack's hello states about the checkpoint."""
        m = self.manifest
        return Resume(m.lineage, m.number, m.racks, m.versions, m.rounds, m.units)

    def restore(self, fragment: int, state: FragmentState, numerics: Numerics) -> None:
        """Set anchor and residual of the fragment. Raises CheckpointError, also if the model does
        not hold the weights of the checkpoint."""
        saved, numel = self.state.progress.fragments[fragment], state.owned.numel
        data = numerics.empty(state.owned)
        data.copy_(self._tensor(f"{fragment}.anchor", data.numel()))
        state.anchor = numerics.adopt(data, state.owned, saved.version, saved.rounds)
        if self.recut is None and state.anchor.digest != saved.digest:
            raise CheckpointError(f"{self.folder}: fragment {fragment} has another digest")
        if not self._has_weights(fragment, state):
            names = [slot.name for slot in state.view.layout.slots]
            raise CheckpointError(
                f"the model and its optimizer do not hold what {self.folder} has of step "
                f"{self.state.progress.step}: fragment {fragment} ({names[0]} to {names[-1]}) "
                "differs. Load the model and the optimizer that were saved with it before mend_init"
            )
        if f"{fragment}.residual" in self.tensors:
            state.residual_N = self._tensor(f"{fragment}.residual", numel)

    def _has_weights(self, fragment: int, state: FragmentState) -> bool:
        """Whether the model holds the saved weights, compared in the slices of the old ranks."""
        if self.recut is not None and self.recut.of_shards:
            pairs = zip(self.weights_then, self.weights_now, strict=True)
            return all(then[fragment] == now[fragment] for then, now in pairs)
        then = [(state.owned, self.state.progress.fragments[fragment].weights)]
        if self.recut is not None:
            then = [
                (self.recut.owned_then(fragment, rank), digests[fragment])
                for rank, digests in enumerate(self.weights_then)
            ]
        for owned, digest in then:
            theta_N = torch.empty(owned.numel, dtype=torch.float32, device="cpu")
            state.view.read(owned, theta_N)
            if digest_of(theta_N, owned.numel, 0) != digest:
                return False
        return True

    def compared(
        self, tensors: Mapping[str, Tensor], frozen: Callable[[Recut], str]
    ) -> RackCheckpoint:
        """This part with `weights_now`, which compares shards of another number of ranks with the
        model. `frozen`: the fact of the frozen parameters as those ranks would have it. All ranks
        together, with collectives over the model. Raises CheckpointError, on all of them."""
        if self.recut is None or not self.recut.of_shards:
            return self
        now, then = frozen(self.recut), dict(self.manifest.facts).get(FROZEN_FACT)
        weights_now = self.recut.weights_digests(tensors)  # a collective, so before the error
        if now != then:
            raise CheckpointError(
                f"{self.folder} is of another plan: {FROZEN_FACT} was {then}, is {now} here"
                f"{remedy_of_plan(self.manifest, self.manifest.ranks)}"
            )
        return replace(self, weights_now=weights_now)

    def registered(self, state: TrainingState) -> None:
        """Give `state` the registered objects of the checkpoint."""
        if self.registered_B is None:
            return
        lost = f"it was written by {self.manifest.ranks} ranks" if self.recut is not None else ""
        try:
            state.resume(self.registered_B, f"checkpoint {self.folder}", lost)
        except StateRefused as error:
            raise CheckpointError(str(error)) from error

    def offers(self, fragment_states: Sequence[FragmentState]) -> list[OpenOffer]:
        """The offers that were open; `fragment_states` must have been restored."""
        offers = []
        for each in self.state.offers:
            state = fragment_states[each.fragment]
            anchor, numel = state.anchor, state.owned.numel
            if anchor.version != each.base:
                anchor = anchor.of_base(each.base)
            delta_N = self._tensor(f"{each.fragment}.delta", numel)
            offers.append(
                OpenOffer(
                    each.fragment, each.seq, each.capture_step, each.tokens, each.steps,
                    each.tokens_total, each.steps_total, anchor, delta_N, state.residual_N,
                    units_total=each.units_total, saved=True,
                )
            )  # fmt: skip
        return offers

    def _tensor(self, name: str, numel: int) -> Tensor:
        values_N = self.tensors.get(name)
        if values_N is None or values_N.numel() != numel:
            has = "missing" if values_N is None else f"of {values_N.numel()} elements"
            raise CheckpointError(f"{self.folder}: {name} is {has}, {numel} are needed")
        return values_N


@dataclass(frozen=True, slots=True)
class Cuttable:
    """What a rack needs to resume a checkpoint of another number of ranks. Its ranks hold the whole
    model, or rows of its tensors. `sharded`: the tensors that they hold rows of. `facts(ranks,
    rows)`: the facts of the plan for that number of ranks, which hold rows of the tensors
    `rows`."""

    layouts: Sequence[Layout]
    weights: int
    facts: Callable[[int, frozenset[str]], Facts]
    sharded: frozenset[str] = frozenset()
    moments: bool = False
    """Whether moments of the optimizer are exchanged: their shards cannot be recut."""


def read_part(
    path: Path, rack: int, group: RackGroup, facts: Facts, cuttable: Cuttable | None = None
) -> RackCheckpoint | None:
    """This rank's part of the checkpoint in `path`, or of the newest one in that folder. None: the
    rack has no part, as it was absent then or its part is lost. All ranks together. Raises
    CheckpointError, on all of them."""
    return together(group, lambda: _read(path, rack, group, facts, cuttable))


def _read(
    path: Path, rack: int, group: RackGroup, facts: Facts, cuttable: Cuttable | None
) -> RackCheckpoint | None:
    path = path.absolute()
    folder = path if any(path.glob("rack-*")) else newest_checkpoint(path)
    if folder is None:
        of_torch = "; it is one of torch.distributed.checkpoint: load a mend.SavedState of it"
        remedy = of_torch if (path / ".metadata").exists() else ""
        raise CheckpointError(f"there is no complete checkpoint in {path}{remedy}")
    manifest = read_manifest(folder, rack)
    if manifest is None:
        return None
    recut = _recut(manifest, group, cuttable)
    free = set[str]()
    if recut is not None and cuttable is not None:
        facts = cuttable.facts(recut.then, recut.sharded_then)
        free |= {FROZEN_FACT} if recut.of_shards else set()
    if why := differing_fact(manifest.facts, facts, free):
        more = remedy_of_plan(manifest, group.ranks, recut=recut is not None)
        raise CheckpointError(f"{folder} is of another plan: {why}{more}")
    own = rack_folder(folder, rack)
    check_files(own, manifest, group.rank, group.ranks)
    if recut is None:
        state, tensors = _read_rank(own, manifest, group.rank)
        return RackCheckpoint(
            folder, manifest, state, tensors, _registered(own, manifest, group.rank)
        )
    states, tensors = recut.tensors(partial(_read_rank, own, manifest))
    weights = tuple(tuple(p.weights for p in each.progress.fragments) for each in states)
    state, registered_B = recut.state(states), _registered(own, manifest, 0)
    return RackCheckpoint(
        folder, manifest, state, tensors, registered_B, recut, weights_then=weights
    )


def _recut(manifest: Manifest, group: RackGroup, cuttable: Cuttable | None) -> Recut | None:
    """None: as many ranks wrote the checkpoint, or it cannot be recut; then the facts differ."""
    facts = dict(manifest.facts)
    stateful = facts.get("codec", "").startswith("powersgd")
    if manifest.ranks == group.ranks or cuttable is None or stateful or manifest.units:
        return None
    placed = {k.removeprefix(PLACED): v for k, v in facts.items() if k.startswith(PLACED)}
    if any(placement != by_rows(manifest.ranks) for placement in placed.values()):
        return None
    recut = Recut(
        cuttable.layouts, cuttable.weights, manifest.ranks, group.ranks, group.rank,
        frozenset(placed), cuttable.sharded,
    )  # fmt: skip
    return None if cuttable.moments and recut.of_shards else recut


def remedy_of_plan(manifest: Manifest, ranks: int, *, recut: bool = False) -> str:
    """What to do about a checkpoint of another plan. `recut`: whether the number of ranks, if it is
    another one, is not the reason."""
    new_job = (
        "begin a new job from the weights that the script has saved: leave resume= out. The outer "
        f"momentum and the {manifest.open_tokens:.10g} tokens that were not merged are lost then"
    )
    if recut or manifest.ranks == ranks:
        return f". Go on with the settings and the model of the checkpoint, or {new_job}"
    return (
        f". It was written by {manifest.ranks} ranks per rack, this job has {ranks}. The number of "
        "ranks can change only for models that each rank holds whole, or, without moments, that "
        "fully_shard has spread over all ranks; without powersgd and a data ledger, from a folder "
        f"of runtime.checkpoint. Start {manifest.ranks} per rack, or {new_job}"
    )


def _read_rank(folder: Path, manifest: Manifest, rank: int) -> tuple[State, dict[str, Tensor]]:
    """Read a rank's file and compare it with the manifest. Raises CheckpointError."""
    state, tensors = read_rank(folder, manifest, rank)
    saved = [(each.version, each.rounds, each.digest) for each in state.progress.fragments]
    digests = [of_ranks[rank] for of_ranks in manifest.digests]
    listed = [*zip(manifest.versions, manifest.rounds, digests, strict=True)]
    if saved != listed or any(offer.fragment not in range(len(saved)) for offer in state.offers):
        raise CheckpointError(f"{folder}: {rank_file(rank)} is not what its manifest says")
    return state, tensors


def _registered(folder: Path, manifest: Manifest, rank: int) -> Tensor | None:
    """The registered objects of a rank, as bytes; None: there are none."""
    name = registered_file(rank)
    if name not in {file.name for file in manifest.files}:
        return None
    return torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.uint8)


def differing_fact(then: Facts, now: Facts, free: Set[str] = frozenset()) -> str:
    """The first fact of the plan that must be equal and is not, in words; empty: there is none."""
    was, is_ = dict(then), dict(now)
    for name in differing(then, now):
        if name not in free:
            return f"{name} was {was.get(name, 'absent')}, is {is_.get(name, 'absent')} here"
    return ""


def left_out(part: RackCheckpoint, racks: int) -> dict[int, float | None]:
    """Racks of the checkpoint that a job of `racks` racks does not have -> tokens that only they
    had; None: not known, as their part is not here."""
    lost: dict[int, float | None] = {}
    for rack in (rack for rack in part.manifest.racks if rack >= racks):
        here = bool(part.manifest.files)  # else each rack has a checkpoint of its own
        manifest = read_manifest(part.folder, rack) if here else None
        lost[rack] = manifest.open_tokens if manifest is not None else None
    return lost
