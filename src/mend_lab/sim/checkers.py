"""Checks the invariants I1..I9 of docs/internals/protocol.md during and after a run.

This module checks the ranks: their bits, ledgers, waits and bounds. `agreement` checks the log,
`liveness` how a job ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mend.consensus.records import Drop
from mend.consensus.weights import part_of
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.vectors import first_unsound
from mend.engine.state.fragment_state import POLL_NS, OpenOffer
from mend.engine.trainer.trainer import Trainer
from mend.engine.trainer.trainer_rounds import ASLEEP_NS
from mend.events import kinds
from mend.events.base import LoggedEvent
from mend.types import MS, SECOND, Peer
from mend_lab.sim import liveness
from mend_lab.sim.agreement import Agreement
from mend_lab.sim.moment_checks import MomentChecks
from mend_lab.sim.scenario import Scenario, rounds_before
from mend_lab.sim.unit_checks import UnitChecks
from mend_lab.sim.vector_ledger import VectorLedger

if TYPE_CHECKING:
    from mend_lab.sim.process import Process, Training
    from mend_lab.sim.world import World

LEDGER_MAX = 1e-4
"""fp32 vectors of order 1, some hundred roundings; a lost or doubled update is 1e-2 and more."""

ANCHORS_MAX = 4
STALL_SLACK_NS = 200 * MS


@dataclass
class Watched:
    """One rank under observation."""

    process: Process
    training: Training
    numerics: Numerics
    ledgers: list[VectorLedger]
    before: list[Tensor] = field(default_factory=list)
    offers: dict[tuple[int, int], OpenOffer] = field(default_factory=dict)
    stalls_read: int = 0

    @property
    def me(self) -> Peer:
        return self.process.me

    @property
    def trainer(self) -> Trainer:
        return self.training.trainer


class Checkers:
    """Call `watch` around every step, `check_note` for every note, and `verdict` at the end."""

    def __init__(self, scenario: Scenario, stall_max_ns: int) -> None:
        self.scenario, self.stall_max_ns = scenario, stall_max_ns
        self.ranks: dict[Peer, Watched] = {}
        self.commits: dict[tuple[int, int], kinds.RoundCommitted] = {}
        self.bits: dict[tuple[int, int, int], str] = {}
        self.problems: list[str] = []
        """Each begins with the invariant that it breaks."""
        self.problem = self.problems.append
        self.former: list[Watched] = []
        self.cuts: dict[tuple[str, int], list[int]] = {}
        """(lineage, number) of a checkpoint -> versions of its first rank."""
        self.cuts_written: set[tuple[str, int]] = set()
        """Checkpoints that some rank knows to be written by all."""
        self.agreement = Agreement(self.problem, self._undo)
        self.units = UnitChecks(self.problem, scenario.fragments)
        self.moments = MomentChecks(self.problem, scenario.moment_periods)

    def _undo(self, versions: tuple[int, ...]) -> None:
        self.commits = {key: c for key, c in self.commits.items() if key[1] <= versions[key[0]]}
        self.bits = {key: d for key, d in self.bits.items() if key[2] <= versions[key[1]]}

    def enter_process(self, process: Process) -> None:
        """Observe a new process and its logs."""
        host: Any = process.host
        machines = [getattr(host, "leader", None), host.coordinator]
        self.agreement.enter(process, [each for each in machines if each is not None])
        process.on_event = self.agreement.check

    def enter(self, process: Process, training: Training, numerics: Numerics) -> None:
        ledgers = [VectorLedger(state.owned.numel) for state in training.trainer.weights]
        if process.me in self.ranks:
            self.former.append(self.ranks[process.me])
        self.ranks[process.me] = Watched(process, training, numerics, ledgers)

    def trace(self) -> str:
        """A digest of everything that the ranks noted, in order: equal for equal runs."""
        digest = hashlib.sha256()
        lives = [*self.former, *(self.ranks[peer] for peer in sorted(self.ranks))]
        for watched in lives:
            for event in watched.process.notes:
                if not isinstance(event, kinds.ProcessStarted):
                    digest.update(f"{watched.me} {event}\n".encode())
        return digest.hexdigest()

    # -------------------------------------------------------------- during the run

    def watch(self, moment: str, training: Training) -> None:
        watched = self.ranks[training.process.me]
        if moment == "before":
            watched.before = [self._theta(watched, p) for p in range(len(watched.ledgers))]
            self._check_twin(training)
        elif moment == "cut":
            self._check_cut(watched)
        elif moment == "written":
            self.cuts_written.add(training.cut_of)
        elif moment == "after":
            if training.units and watched.me.rank == 0:
                step = training.trainer.step + 1
                self.units.took(watched.process.member, step, training.units)
            for p, ledger in enumerate(watched.ledgers):
                ledger.moved(watched.before[p], self._theta(watched, p))
        self._check_bounds(watched)

    def _check_twin(self, training: Training) -> None:
        """A rack that copies another rack's optimizer and step gets both of the same moment."""
        moments, step = training.moments, training.trainer.step
        if moments is not None and not moments.fits(step):
            me = training.process.me
            self.problem(f"twin: {me} has made {step} steps, its optimizer's state is of others")

    def _check_evicted(self, watched: Watched) -> None:
        """I9: an evicted rank leaves no unmerged work."""
        self._check_tokens(watched)
        self._check_vectors(watched)
        trainer = watched.trainer
        offers = [p for p, state in enumerate(trainer.fragment_states) if state.offer is not None]
        if trainer.open_tokens() or offers:
            self.problem(
                f"I9: {watched.me} is evicted with {trainer.open_tokens()} open tokens, offers of "
                f"fragments {offers}"
            )

    def _check_cut(self, watched: Watched) -> None:
        """All ranks write the same versions, and count as merged what these versions contain."""
        trainer, key = watched.trainer, watched.training.cut_of
        versions = [state.anchor.version for state in trainer.fragment_states]
        if self.cuts.setdefault(key, versions) != versions:
            self.problem(
                f"I3: checkpoint {key[1]}: {watched.me} writes versions {versions}, others "
                f"{self.cuts[key]}"
            )
        named = self._tokens_named(watched)
        same_job = self.agreement.merged and not self.agreement.beyond
        if same_job and named != trainer.ledger.merged * self.scenario.ranks:
            self.problem(
                f"I3: checkpoint {key[1]}: {watched.me} writes {trainer.ledger.merged} tokens as "
                f"merged, its versions have {named}"
            )

    def _theta(self, watched: Watched, fragment: int) -> Tensor:
        state = watched.trainer.fragment_states[fragment]
        theta_N = torch.empty(state.owned.numel)
        state.view.read(state.owned, theta_N)
        return theta_N

    def check_note(self, process: Process, event: LoggedEvent) -> None:
        """Check an event of a process, as it happens."""
        if isinstance(event, kinds.JobGivenUp):
            self.agreement.forget(process)
        watched = self.ranks.get(process.me)
        if watched is None or watched.process is not process or self.agreement.beyond:
            return
        match event:
            case kinds.RoundCommitted():
                self.agreement.check(process)  # a new lineage may have begun in this very event
                self._read_commit(event)
            case kinds.FragmentCaptured():
                offer = watched.trainer.fragment_states[event.fragment].offer
                assert offer is not None
                watched.offers[(offer.fragment, offer.seq)] = offer
                self.moments.captured(watched, offer)
            case kinds.VersionApplied():
                self._check_applied(watched, event)
            case kinds.OfferDiscarded():
                del watched.offers[(event.fragment, event.seq)]
            case kinds.RankEvicted():
                self._check_evicted(watched)
            case kinds.DigestDiffers() | kinds.ProtocolFault():
                self.problem(f"I1: {process.me}: {event.sentence()}")

    def _read_commit(self, event: kinds.RoundCommitted) -> None:
        """Remember a commit, which `agreement` has checked. A rack that joins also reads
        those that a new lineage has undone."""
        key = (event.fragment, event.version)
        commit = self.agreement.in_force.get(key)
        if commit is not None and tuple(commit.digests) == event.digests:
            self.commits.setdefault(key, event)
        racks = [member.rack for member in event.members]
        if racks != sorted(set(racks)) or not racks:
            self.problem(f"I1: members of {key} do not ascend: {racks}")

    def _check_applied(self, watched: Watched, event: kinds.VersionApplied) -> None:
        """A rank trains on the bits of every other rank of its rail, which are those of the log."""
        fragment, version = event.fragment, event.version
        self._check_stalls(watched)
        if event.seq:
            offer = watched.offers.pop((fragment, event.seq))
            if event.fate == "named" and fragment < len(watched.ledgers):
                watched.ledgers[fragment].named(_sent(offer))
        rail = watched.me.rank
        anchor = watched.trainer.fragment_states[fragment].anchor
        if first_unsound(anchor.values) is not None:
            self.problem(f"I8: {watched.me} trains on an anchor that is not numbers")
        if anchor.version == version:
            digest = anchor.recomputed()
            if self.bits.setdefault((rail, fragment, version), digest) != digest:
                self.problem(
                    f"I1: {watched.me} has other bits of fragment {fragment} version {version}"
                )
            self._check_rounds(watched, fragment, anchor)
            self.moments.applied(watched, fragment, anchor, self.commits.get((fragment, version)))
            commit = self.commits.get((fragment, version))
            logged = commit.digests if commit else None
            if logged is not None and logged[rail] != digest:
                self.problem(
                    f"I1: {watched.me}: fragment {fragment} version {version} has other bits than "
                    "the log says"
                )

    def _check_rounds(self, watched: Watched, fragment: int, anchor: Anchor) -> None:
        """The ramp of the momentum counts what was merged, not versions."""
        first = self.scenario.first
        versions = range(first + 1, anchor.version + 1)
        commits = [self.commits.get((fragment, version)) for version in versions]
        if None in commits:
            return  # the process that read it is gone
        merged = rounds_before(first)
        for commit in filter(None, commits):
            named = [(each.tokens, each.steps) for each in commit.members]
            absent = [(each.tokens, each.steps) for each in commit.absent]
            period = self.scenario.period_steps
            merged += part_of(named, absent, token_weighted=True, period_steps=period)
        if anchor.rounds != merged:
            self.problem(
                f"I1: {watched.me} counts {anchor.rounds} parts of rounds in fragment "
                f"{fragment} version {anchor.version}, the log {merged}"
            )

    def _check_bounds(self, watched: Watched) -> None:
        rank, scenario = watched.training.rank, self.scenario
        limit = 3 * scenario.racks * len(watched.trainer.fragment_states)
        if len(rank.store.payloads) > limit:
            self.problem(
                f"I6: {watched.me} keeps {len(rank.store.payloads)} payloads, the limit is {limit}"
            )
        per_fragment = Counter(fragment for fragment, _ in rank.store.anchors)
        if any(count > ANCHORS_MAX for count in per_fragment.values()):
            counts = dict(per_fragment)
            self.problem(f"I6: {watched.me} keeps {counts} anchors per fragment")

    # -------------------------------------------------------------- at the end

    def verdict(self, world: World, finished: bool) -> list[str]:
        self.agreement.end()
        if refused := world.broken.felt["keys"]:  # neighbouring lives accept each other's key
            self.problem(f"I4: {refused} frames and pulls were refused for their key")
        if self.agreement.beyond:
            return self.problems
        if self.scenario.units:
            merged = self.agreement.merged.items()
            shares = [(member, p, share) for (member, p, _), share in merged]
            self.units.verdict(filter(None, self.agreement.records), shares)
        for watched in self.ranks.values():
            if not watched.process.dead:
                self._check_tokens(watched)
                self._check_vectors(watched)
                self._check_stalls(watched)
                self._check_numbers(watched)
                self._check_outcome(watched)
        for text in world.network.missed:
            self.problem(f"I1: {text}")
        for detail in liveness.verdict(world, finished):
            self.problem(f"I4: {detail}")
        return self.problems

    def _check_tokens(self, watched: Watched) -> None:
        """I2: merged + open + discarded = trained, per rank, and the log names the merged ones."""
        trainer = watched.trainer
        fragments = len(trainer.weights)
        total = trainer.ledger.merged + trainer.ledger.discarded + trainer.open_tokens()
        if total != trainer.tokens * fragments:
            self.problem(
                f"I2: {watched.me}: {trainer.ledger} + open {trainer.open_tokens()} != "
                f"{trainer.tokens} x {fragments}"
            )
        named = self._tokens_named(watched)
        if named != trainer.ledger.merged * self.scenario.ranks:
            self.problem(
                f"I2: {watched.me}: the log names {named} tokens, the rank counts "
                f"{trainer.ledger.merged} as merged"
            )

    def _tokens_named(self, watched: Watched) -> int:
        """Tokens of the rack that the log names up to the versions that this rank trains on."""
        fragment_states = watched.trainer.weights
        return sum(
            share.tokens
            for (member, p, version), share in self.agreement.merged.items()
            if member == watched.process.member
            and p < len(fragment_states)
            and version <= fragment_states[p].anchor.version
        )

    def _check_vectors(self, watched: Watched) -> None:
        """I2, for carry: every update is in a merged offer, in e, or still in theta."""
        if self.scenario.apply_mode != "carry" or any(
            rack == watched.me.rack for rack, _ in self.scenario.non_finite
        ):
            return
        for fragment, state in enumerate(watched.trainer.weights):
            theta_N = self._theta(watched, fragment)
            error = watched.ledgers[fragment].error(theta_N, state.anchor.values, state.residual_N)
            if watched.trainer.step and error > LEDGER_MAX:
                self.problem(
                    f"I2: {watched.me}: the ledger of fragment {fragment} is open by {error:.2e}"
                )

    def _check_numbers(self, watched: Watched) -> None:
        """I8: no rank ends in order with NaN or Inf in its weights, or after it was dropped."""
        if watched.training.failure is not None or not watched.training.ended:
            return
        for p in range(len(watched.ledgers)):
            if first_unsound(self._theta(watched, p)) is not None:
                self.problem(f"I8: {watched.me} ends in order with NaN in fragment {p}")
        known = watched.training.rank.rank_machine.decided
        for record in self.agreement.records[1 : known + 1]:
            if not isinstance(record, Drop) or not record.diverged:
                continue
            if any(ended.member == watched.process.member for ended in record.dropped):
                self.problem(f"I8: {watched.me} ends in order, though {record.reason}")

    def _check_outcome(self, watched: Watched) -> None:
        """I10: a rank that says `merged` has the versions that were decided before the end, and all
        its work is in them. One that keeps its own weights says why."""
        trainer, outcome = watched.trainer, watched.trainer.outcome
        if outcome.word == "kept-local" and not outcome.detail:
            self.problem(f"I10: {watched.me} keeps its own weights, and does not say why")
        if outcome.word != "merged":
            return
        versions = [state.anchor.version for state in trainer.fragment_states]
        ended = self.agreement.ended_versions()
        if versions != ended:
            self.problem(f"I10: {watched.me} is merged at {versions}, the job ended at {ended}")
        if trainer.open_tokens():
            self.problem(f"I10: {watched.me} is merged, with {trainer.open_tokens()} open tokens")

    def _check_stalls(self, watched: Watched) -> None:
        """I5: between two applies the training thread waits at most stall_max_s for results in all,
        however many apply points pass. A wait in which its process stood still is made again; a
        process cannot tell that from a clock that jumps."""
        stalls = watched.training.stalls
        since, watched.stalls_read = stalls[watched.stalls_read :], len(stalls)
        waits = [each for each in since if POLL_NS < each[1] <= self.stall_max_ns]
        waited_ns = sum(waited for waited, _ in waits)
        frozen = [f.end_ns - f.begin_ns for f in self.scenario.faults if f.kind == "freeze"]
        again_ns = sum(limit for waited, limit in waits if frozen and waited > limit + ASLEEP_NS)
        jumps = [f.amount for f in self.scenario.faults
                 if (f.kind, f.a) == ("clock_jump", watched.me.rack)]  # fmt: skip
        again_ns += self.stall_max_ns * sum(ahead_ns > ASLEEP_NS for ahead_ns in jumps)
        if waited_ns > self.stall_max_ns + again_ns + STALL_SLACK_NS + sum(frozen):
            self.problem(
                f"I5: {watched.me} waited {waited_ns / SECOND:.2f} s in one outage, the limit is "
                f"{self.stall_max_ns / SECOND:.2f} s"
            )


def _sent(offer: OpenOffer) -> Tensor:
    """The decoded offer in fp64: `sent_N` with feedback in the weights, else y = D + e - pend."""
    if offer.sent_N is not None:
        return offer.sent_N.double()
    y_N = offer.delta_N.double()
    if offer.residual_N is not None:
        y_N = y_N + offer.residual_N.double()
    return y_N if offer.pend_N is None else y_N - offer.pend_N.double()
