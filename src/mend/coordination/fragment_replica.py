"""A rank's view of one fragment: offers, tentative merges, the decided version."""

from __future__ import annotations

from dataclasses import dataclass, field

from mend.consensus.log import offers_of
from mend.consensus.records import Commit
from mend.coordination.events import (
    Copied,
    DropAnchor,
    Effect,
    Measured,
    Merged,
    Note,
    PublishAnchor,
)
from mend.coordination.fetch_queue import RETRY_NS_MAX, RETRY_NS_MIN
from mend.coordination.messages import Held, MergeProposal
from mend.coordination.slices import Slices
from mend.coordination.sums import Sums
from mend.detector import DetectorOptions
from mend.events.kinds import MergeFailed, VersionCopied, VersionCopyFailed
from mend.types import SECOND, Member

HELD_BEHIND = 2
"""Decided versions that are kept besides the one that is trained on, because the ranks of a rack
must find a common one."""

LINGER_NS = 30 * SECOND
"""A named payload is freed at most this long after the decision, even if a rack lacks the
result."""

NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class RankOptions:
    heartbeat_ns: int
    ranks: int = 1
    sums: bool = False
    """Whether a merge of several offers first needs sums over the rack's ranks."""
    detector: DetectorOptions = field(default_factory=DetectorOptions)


@dataclass
class FragmentReplica:
    """One fragment on this rank. `held`: decided versions whose bytes are here."""

    held: set[int] = field(default_factory=set)
    applied: int = 0
    pinned: int = -1
    """The version of a checkpoint that this rank has not reached yet, while other racks may be past
    it; -1: none."""
    commits: dict[int, Commit] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    proposal: MergeProposal | None = None
    merging: tuple[int, int] | None = None
    """(version, attempt) that a worker measures or merges; one at a time."""
    sums: Sums = field(default_factory=Sums)
    slices: Slices = field(default_factory=Slices)
    tentative: Held | None = None
    """The newest result that is not decided yet."""
    copying: int | None = None
    undone: bool = False
    """Whether the version that is being copied was undone, so that its number is given to other
    bits."""
    retry_ns: int = 0
    wait_ns: int = RETRY_NS_MIN
    linger: dict[tuple[Member, int], tuple[int, int]] = field(default_factory=dict)
    """Named payloads that are still served: (member, seq) -> (version of the commit, time at which
    it was read)."""

    @property
    def newest(self) -> int:
        """The newest version held; -1 = none."""
        return max(self.held, default=-1)

    @property
    def pulls_slices(self) -> bool:
        """Whether the result of a sharded attempt is still missing."""
        proposal = self.slices.proposal
        if proposal is None or proposal.version in self.held:
            return False
        return self.lacks(proposal)

    def lacks(self, proposal: MergeProposal) -> bool:
        """Whether the result of this attempt is missing here."""
        return self.tentative is None or self.tentative.which != proposal.which

    def begin(self, version: int, digest: str, own: tuple[int, str]) -> bool:
        """Read the first record. Returns whether this rank holds the version that the job begins
        with. `own`: version and digest that this rank begins with."""
        self.digests[version] = digest
        same = (version, digest) == own
        self.held |= {version} if same else set()
        return same

    def restore(self, version: int, digest: str) -> list[int]:
        """Continue from a snapshot at `version`. Returns the versions that are no longer held:
        without the records nothing shows that the ones in between are decided."""
        same = self.digests.get(version) == digest
        held = version in self.held and same
        gone = sorted(v for v in self.held if v > self.applied and not (held and v == version))
        self.held -= set(gone)
        if self.copying is not None and not (self.copying == version and same):
            self.undone = True  # its number may be given to other bits
        self.digests = {v: d for v, d in self.digests.items() if v <= self.applied}
        self.digests[version] = digest
        self.commits, self.retry_ns = {}, 0
        return gone

    def commit(self, record: Commit, digest: str, now_ns: int) -> None:
        """Read a commit. The payloads that it names are served until all racks have the result."""
        self.commits[record.version], self.digests[record.version] = record, digest
        self.retry_ns = 0
        for share in record.members:
            self.linger[(share.member, share.seq)] = (record.version, now_ns)

    def drop_outgrown(self, newest: int) -> list[int]:
        """Drop and return the versions that are not needed, or not decided any more. A rank that
        lags behind keeps the newest version it has, to train on."""
        recent = newest - HELD_BEHIND
        gone: list[int] = []
        if not all(v <= newest and (recent < v or v == self.applied) for v in self.held):
            real = {v for v in self.held if v <= newest}
            keep = {v for v in real if v > recent} | {max(real, default=self.applied)}
            keep |= {self.applied, self.pinned} & real
            gone, self.held = sorted(self.held - keep), self.held & keep
        if any(v <= recent for v in self.digests):
            self.digests = {v: d for v, d in self.digests.items() if v > recent or v in self.held}
        return gone

    def begin_anew(self, version: int, digest: str) -> set[tuple[Member, int]]:
        """Continue in a new lineage from `version`. Returns the offers that undone commits had
        named or dropped. A rank may hold a later version that another rank of its rack lacked, or
        that arrived after its leader had reported; it does not continue from that one."""
        self.undone |= self.copying is not None and self.copying > version
        undone = [self.commits.pop(v) for v in sorted(self.commits) if v > version]
        self.digests = {v: d for v, d in self.digests.items() if v < version} | {version: digest}
        return {(each.member, each.seq) for commit in undone for each in offers_of(commit)}

    def forget_rounds(self, version: int) -> bool:
        """Forget a round of an undone lineage, which is for a later version than the one after
        `version`, the newest decided. Returns False if there is none."""
        forgets = self.proposal is not None and self.proposal.version > version + 1
        if forgets:
            self.proposal = None
        return forgets

    def same_members(self, version: int) -> bool:
        """Whether the decision on this version has the same members as the newest proposal."""
        commit, proposal = self.commits.get(version), self.proposal
        if commit is None or proposal is None or proposal.version != version:
            return False
        named = [(share.member, share.seq) for share in commit.members]
        asked = [(offer.member, offer.seq) for offer in proposal.members]
        return named == asked and commit.absent == proposal.absent

    def on_copied(self, event: Copied, now_ns: int) -> list[Effect]:
        """A pull of the state of a version has ended."""
        undone, self.undone, self.copying = self.undone, False, None
        if event.error:
            self.back_off(now_ns)
            return [Note(VersionCopyFailed(event.fragment, event.version, event.error))]
        if undone:
            return [DropAnchor(event.fragment, event.version)]
        self.wait_ns = RETRY_NS_MIN
        self.held.add(event.version)
        copied = Note(VersionCopied(event.fragment, event.version))
        return [PublishAnchor(event.fragment, event.version, 0), copied]

    def on_measured(self, event: Measured, now_ns: int) -> list[Effect]:
        self.merging = None
        self.sums.on_measured(event)
        return self._failed(event, now_ns) if event.error else []

    def on_merged(self, event: Merged, now_ns: int) -> list[Effect]:
        """Keep the result if it is of the requested attempt."""
        self.merging = None
        wanted = self.proposal
        if event.error:
            self.slices.failed(*event.which)
            return self._failed(event, now_ns)
        if wanted is None or wanted.which != event.which:
            return [DropAnchor(*event.key)]
        self.tentative = Held(*event.key, (event.digest,))
        return []

    def _failed(self, event: Measured | Merged, now_ns: int) -> list[Effect]:
        self.back_off(now_ns)
        return [Note(MergeFailed(event.fragment, event.version, event.error))]

    def train_on(self, version: int) -> None:
        self.applied = version
        self.pinned = self.pinned if self.pinned > version else -1
        for old in [v for v in self.commits if v <= version]:
            del self.commits[old]

    def due_ns(self) -> int:
        """When settling this fragment may do something although nothing has happened."""
        dues = [since_ns + LINGER_NS + 1 for _, since_ns in self.linger.values()]
        if self.retry_ns:
            dues.append(self.retry_ns)
        return min([*dues, *self.slices.dues_ns(), *self.slices.stale_ns()], default=NEVER_NS)

    def back_off(self, now_ns: int) -> None:
        """Retry later, after twice the last pause."""
        self.retry_ns = now_ns + self.wait_ns
        self.wait_ns = min(2 * self.wait_ns, RETRY_NS_MAX)
