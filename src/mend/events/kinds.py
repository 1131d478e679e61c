"""Every kind of event, one struct each. `python -m tests.events_table` makes docs/events.md and
docs/internals/events.md from this module.

A struct's tag, its fields and their names are a format: a reader of a newer mend opens the files of
this one. A new field gets a default. A kind that is gone leaves its tag unused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from mend.detector import cause_in_words
from mend.events.base import (
    DebugEvent,
    ErrorEvent,
    InfoEvent,
    LoudEvent,
    Number,
    WarningEvent,
    Whole,
    shown,
)

Against = Literal["own past", "peers"]
Fate = Literal["none", "named", "dropped"]
FRAGMENTS_MAX = 4096
Fragment = Annotated[int, Meta(ge=0, lt=FRAGMENTS_MAX)]

BUFFERS_PAGE = "docs/troubleshooting.md, Buffers differ between racks"
PULLS_PAGE = "docs/troubleshooting.md, Nothing is merged any more"
REPORT = "report it with the tapes and the events files of all racks (diagnostics_dir)"
RESTART = "start it again, and it joins with the merged weights"
STAYS = "what this rack trained stays in its weights"


# ------------------------------------------------------------------ a process and its start


class ProcessStarted(InfoEvent, frozen=True, tag="start"):
    """The leader has built its rack."""

    says = "rack and incarnation {member} of job {job} begins"
    member: tuple[int, ...]
    """Rack, then incarnation."""
    plan: str
    """Hash of what all racks must share; empty: this rack exchanges nothing."""
    job: str
    exchange: bool = True
    """False: every rack trains by itself."""
    elements: Whole = 0
    """Of the weights that the racks exchange; 0: not known."""


class ProtectionChosen(InfoEvent, frozen=True, tag="protection"):
    says = "other processes are kept out by: {protection}"
    protection: str
    """keys, loopback or insecure."""


class RackPlaced(LoudEvent, frozen=True, tag="placed"):
    """At the start, if mend [found](configuration.md#which-rack-this-is) the rack, its address
    or the number of racks."""

    says = "this rack and the number of racks ({racks}) were found from sideband_peers"
    racks: Whole
    address: str


class OptimizerFound(InfoEvent, frozen=True, tag="counting"):
    """mend_init got no optimizer, and this one is seen training the model."""

    says = "the steps of this {optimizer} are counted"
    optimizer: str
    parameters: Whole
    exchanged: Whole


class PortAwaited(LoudEvent, frozen=True, tag="port-waits"):
    """A port is taken by a process that was killed and is still ending; the start waits for it."""

    says = "ports {ports} are held by {by}, which is ending: waiting up to {max_s} s"
    ports: str
    by: str
    max_s: float


class MemoryLocked(LoudEvent, frozen=True, tag="locks-memory"):
    """Each rank of a rack with GPUs page-locks gigabytes of host memory before it begins."""

    says = "each rank page-locks {gb} GB of host memory, which takes about a second per GB"
    gb: float


class HostUnknown(WarningEvent, frozen=True, tag="name-unknown"):
    """The name of a host in the settings has no address on this machine; said once, and tried
    again for as long as the job waits."""

    says = "the name {host} has no address on this machine"
    remedy = (
        "correct the host in MEND_SIDEBAND_PEERS or MEND_WITNESS_ADDR, or make this machine's DNS "
        "or /etc/hosts know it; mend goes on trying"
    )
    host: str


class StillWaiting(LoudEvent, frozen=True, tag="waiting"):
    """Every 5 s while the job has not begun, and while a checkpoint waits for the other racks;
    at once when a rack was refused."""

    says = "has waited for {seconds} s, for: {for}"
    what: str = field(name="for")
    seconds: Whole


class HelloHeard(InfoEvent, frozen=True, tag="hello"):
    says = "rack {rack} at {address} asks for its place in the job"
    rack: Whole
    address: str


class RackRefused(WarningEvent, frozen=True, tag="refused"):
    says = "rack {rack} was refused: {detail}"
    remedy = "see docs/troubleshooting.md, A rack is refused"
    rack: Whole
    cause: str
    detail: str


class JobFounded(InfoEvent, frozen=True, tag="genesis"):
    says = "racks {racks} have met: the job begins"
    racks: tuple[Whole, ...]


class JobResumed(InfoEvent, frozen=True, tag="resumes"):
    """Coordinator: the log begins with a [checkpoint](checkpoints.md); `without`: racks that
    have a part of it and are not in the job."""

    says = "the job resumes checkpoint {checkpoint}, without racks {without}, at {versions}"
    lineage: str
    checkpoint: Whole
    without: tuple[Whole, ...]
    versions: tuple[Whole, ...]


class BuffersDiffer(WarningEvent, frozen=True, tag="buffers-differ"):
    """At the start, in the process that begins the job: these racks have other values in this
    buffer, and in so many more, than `from_rack`; [buffers are not
    exchanged](troubleshooting.md#buffers-differ-between-racks)."""

    says = (
        "buffer {buffer}, and {more} more, differ between rack {from_rack} and racks {racks}: "
        "buffers are not exchanged, each rack computes with its own"
    )
    remedy = f"make constants such as masks from one seed or file; see {BUFFERS_PAGE}"
    buffer: str
    more: Whole
    racks: tuple[Whole, ...]
    from_rack: Whole


class BuffersChanged(WarningEvent, frozen=True, tag="buffers-changed"):
    """At the end: training changed these buffers and frozen parameters, and they are not
    exchanged."""

    says = "{buffers} changed in training and are not exchanged: each rack has its own"
    remedy = f"see {BUFFERS_PAGE}"
    buffers: str


class WeightsReplaced(WarningEvent, frozen=True, tag="weights-replaced"):
    """This rack began with other weights than the job, by so many percent of their length; they
    were replaced. If the script had loaded them (a framework's own resume), its progress is
    gone: load the same file on every rack, or resume with `mend_init(resume=)`."""

    says = "the weights of this rack were not those of the job, and were replaced"
    remedy = "racks that begin with equal weights (one seed, one file) copy nothing"
    differ_pct: float


class AsyncTpChosen(InfoEvent, frozen=True, tag="async-tp"):
    """async_tp_enabled: after the first step, or at the start if it cannot work."""

    says = "async tensor parallelism is {description}"
    description: str
    graphs: Whole
    fused: Whole


class AsyncTpUnused(WarningEvent, frozen=True, tag="async-tp-in-vain"):
    says = "async_tp_enabled has no effect: {description}"
    remedy = "switch it off, or compile the model so that torch can fuse its products"
    description: str


# ------------------------------------------------------------------ the coordinator and the seats


class CoordinatorSilent(WarningEvent, frozen=True, tag="coordinator-silent"):
    """This leader has not heard the coordinator for the detection time."""

    says = "the coordinator ({peer}) is silent: nothing is merged until it or another one is heard"
    remedy = "see docs/troubleshooting.md, A rack is silent"
    peer: str


class CoordinatorBack(LoudEvent, frozen=True, tag="coordinator-back"):
    says = "the coordinator ({peer}) is heard again"
    peer: str


class StandsForElection(InfoEvent, frozen=True, tag="stands"):
    """This voter has not heard a coordinator for this long and asks the others to follow it."""

    says = "asks for votes in ballot {ballot}, after {silent_ms} ms of silence"
    ballot: Whole
    silent_ms: Whole


class ElectionLeft(InfoEvent, frozen=True, tag="stands-no-more"):
    """Another voter was faster, or the old coordinator is back."""

    says = "gives up its candidacy in ballot {ballot}"
    ballot: Whole


class CoordinatorChosen(LoudEvent, frozen=True, tag="takes-over"):
    says = "coordinates the job from record {record} on, in ballot {ballot}"
    ballot: Whole
    record: Whole


class CoordinatorDeposed(LoudEvent, frozen=True, tag="deposed"):
    """This process no longer coordinates: it heard no quorum, or others have promised a higher
    ballot."""

    says = "no longer coordinates the job, in ballot {ballot}"
    ballot: Whole


class QuorumLost(WarningEvent, frozen=True, tag="no-quorum"):
    """This process coordinated, and has heard no quorum for two detection times."""

    says = "hears too few voters in ballot {ballot}: nothing is merged until more are heard"
    remedy = "start the silent racks or the witness again, or retire a rack that is lost"
    ballot: Whole


class LineageBegun(WarningEvent, frozen=True, tag="lineage"):
    """All missing racks are dead, and the job goes on without them from these versions."""

    says = "the job goes on without racks {without}, from versions {versions}"
    remedy = "start these racks again: they join with the merged weights"
    without: tuple[Whole, ...]
    versions: tuple[Whole, ...]


class VersionsUndone(WarningEvent, frozen=True, tag="undone"):
    """Only dead racks held these versions: the fragments go back to the newest ones that are
    left, and what this rack trained stays in its weights."""

    says = "{back}: only racks {dead}, which are dead, held these versions; " + STAYS
    remedy = "see docs/internals/protocol.md, When no quorum is left"
    back: tuple[str, ...]
    dead: tuple[Whole, ...]


class JobGivenUp(WarningEvent, frozen=True, tag="gives-up"):
    """The witness has forgotten the former job of this name: all its racks were started again,
    so nobody has its weights."""

    says = (
        "the former job of this name ({records} records, versions {versions}) is given up: every "
        "rack was started again, so no process has its weights"
    )
    remedy = "to go on from a checkpoint, stop all racks and start them with resume"
    records: Whole
    versions: tuple[Whole, ...]
    dead: tuple[str, ...]
    lineage: str


class RackRetired(LoudEvent, frozen=True, tag="retired"):
    says = "rack {rack} was retired by a person"
    rack: Whole


class RosterChanged(InfoEvent, frozen=True, tag="roster"):
    says = "the job has racks {racks}, of which {votes} vote: {reason}"
    racks: tuple[Whole, ...]
    votes: tuple[Whole, ...]
    reason: str

    def sentence(self) -> str:
        return super().sentence() if self.racks else f"no rack is left: {self.reason}"


class ProtocolFault(ErrorEvent, frozen=True, tag="fault"):
    """Coordinator: equal members, unequal results."""

    says = "{detail}"
    remedy = "see docs/troubleshooting.md, The digest differs"
    detail: str


class SnapshotRead(InfoEvent, frozen=True, tag="snapshot"):
    """A rank continues from the sum of the log at this record; it was too far behind to read the
    log."""

    says = "reads the log from record {record} on"
    record: Whole


class RackSilent(WarningEvent, frozen=True, tag="rack-silent"):
    """A rack of the job is not heard any more; the effect says whether rounds go on."""

    says = "rack {peer} is silent: {effect}"
    remedy = "see docs/troubleshooting.md, A rack is silent"
    peer: Whole
    effect: str


class RackBack(LoudEvent, frozen=True, tag="rack-back"):
    says = "rack {peer} is heard again"
    peer: Whole


class RackExpelled(ErrorEvent, frozen=True, tag="expelled"):
    """The job ended while this rack was silent and trained; it goes on by itself."""

    says = "{reason}"
    remedy = "see docs/troubleshooting.md, A rack lost its seat"
    reason: str


class OwnSeatLost(ErrorEvent, frozen=True, tag="seat-lost"):
    """[The others went on without this rack](troubleshooting.md#a-rack-lost-its-seat), which
    ends at its next step."""

    says = "{reason}"
    remedy = RESTART
    reason: str


class JobBegunAgain(WarningEvent, frozen=True, tag="job-lost"):
    """The last rack that held the weights died before this one had copied them; `mend_init`
    begins again with this rack as a new life."""

    says = "{detail}: this rack begins again"
    remedy = "see docs/joining.md"
    detail: str


class OtherJobHeard(WarningEvent, frozen=True, tag="other-job"):
    """A process of another job speaks to this one: set one `job_id` (`MEND_JOB_ID`) everywhere,
    or it is left over from an earlier job, and stays out."""

    says = "{effect}"
    remedy = "stop the process of the other job, or give it other ports"
    from_rack: Whole
    job: str
    effect: str


class FrameRefused(WarningEvent, frozen=True, tag="frame-refused"):
    """A frame of another job or protocol; the first 20."""

    says = "a frame was refused: {reason}"
    remedy = "see docs/troubleshooting.md, A rack is refused"
    reason: str
    count: Whole


class StrangersRefused(WarningEvent, frozen=True, tag="strangers"):
    """Number of connections without a [key of this job](troubleshooting.md#the-keys-differ),
    counted up to 1,000."""

    says = "{handshakes} handshakes did not have this job's key"
    remedy = "docs/troubleshooting.md, The keys differ"
    handshakes: Whole


class InvariantBroken(ErrorEvent, frozen=True, tag="invariant-broken"):
    """[mend has broken a rule of its own](troubleshooting.md#invarianterror):
    this process stops."""

    says = "{detail}: this process stops"
    remedy = RESTART
    detail: str


# ------------------------------------------------------------------ training and its rounds


class Progress(DebugEvent, frozen=True, tag="progress"):
    """After the first step, every second, and once at the end."""

    says = "step {step}, {tokens} tokens"
    step: Whole
    tokens: Whole
    at_ns: Whole
    """End of the step, wall time."""
    stall_ms_total: float
    bytes_sent: Whole
    bytes_received: Whole
    last: bool = False
    """The process ended in order."""
    merges: Whole = 0
    """Merges of weights that this rank has computed."""
    agreement: float | None = None
    """Mean cosine of two racks' deltas in these merges, on a sample; none: nothing compared."""


class ValuesRecorded(DebugEvent, frozen=True, tag="recorded"):
    """The script has called `runtime.record`."""

    says = "the script recorded {values} at step {step}"
    step: Whole
    tokens: Whole
    at_ns: Whole
    values: dict[str, float | str]
    """NaN and infinity as words."""


class StepsUncounted(WarningEvent, frozen=True, tag="uncounted"):
    says = "the weights change, but no step was counted since step {step}"
    remedy = "call runtime.step() after each step, or give mend_init the optimizer"
    step: Whole


class FragmentCaptured(DebugEvent, frozen=True, tag="captured"):
    """A fragment was copied, and an offer is open; closing: the last one of the run ([feedback
    in the weights](compression.md#the-residual) sends it as fp32)."""

    says = "fragment {fragment} is captured at step {step}: offer {seq}, {tokens} tokens"
    step: Whole
    fragment: Whole
    seq: Whole
    base: Whole
    tokens: Whole
    steps: Whole
    closing: bool = False


class OfferStillOpen(InfoEvent, frozen=True, tag="still-open"):
    says = "fragment {fragment} is not captured at step {step}: offer {seq} is still open"
    step: Whole
    fragment: Whole
    seq: Whole


class OfferEncoded(DebugEvent, frozen=True, tag="encoded"):
    """A lossy codec has made the offer's payload; residual: the share of its length left for a
    later round."""

    says = "offer {seq} of fragment {fragment} has {bytes} bytes, {fp32_bytes} as fp32"
    fragment: Whole
    seq: Whole
    bytes: Whole
    fp32_bytes: Whole
    residual: float
    """Share (length over length) that the codec left for a later offer."""
    moments: bool = False


class OfferDeclined(ErrorEvent, frozen=True, tag="declined"):
    says = "offer {seq} of fragment {fragment} is not made: {reason}"
    remedy = "see docs/troubleshooting.md, A rack has diverged"
    fragment: Whole
    seq: Whole
    reason: str


class FetchFailed(InfoEvent, frozen=True, tag="fetch-failed"):
    """A pull of an offer failed; it is tried again."""

    says = "a pull of offer {seq} of rack {rack}, fragment {fragment}, failed: {error}"
    rack: Whole
    fragment: Whole
    seq: Whole
    error: str


class MergeFailed(InfoEvent, frozen=True, tag="merge-failed"):
    """An input failed its checksum or is missing, and is tried again; or a payload contains NaN
    or Inf."""

    says = "fragment {fragment} version {version} could not be merged yet: {error}"
    fragment: Whole
    version: Whole
    error: str


class SumsFailed(InfoEvent, frozen=True, tag="sums-failed"):
    """Leader: the measurements of its ranks cannot be added (different mends in one rack?); the
    state is copied."""

    says = "the sums of fragment {fragment} version {version} could not be made yet: {error}"
    fragment: Whole
    version: Whole
    error: str


class RoundDecided(DebugEvent, frozen=True, tag="decided"):
    says = "fragment {fragment} version {version} is decided"
    fragment: Whole
    version: Whole


class MergedShare(Struct, frozen=True):
    """An offer that a round merged."""

    rack: Whole
    seq: Whole
    base: Whole
    capture_step: Whole
    tokens: Whole
    steps: Whole


class AbsentRack(Struct, frozen=True):
    """A rack that trained at the time of a round and was not in it."""

    rack: Whole
    tokens: Whole
    steps: Whole
    closing: bool


class DroppedOffer(Struct, frozen=True):
    """An offer that no round will merge."""

    rack: Whole
    seq: Whole


class RoundCommitted(DebugEvent, frozen=True, tag="commit"):
    """A rank has read a decided commit."""

    says = "fragment {fragment} version {version} merges racks {members}: {reason}"
    fragment: Fragment
    version: Whole
    members: tuple[MergedShare, ...]
    live: Whole
    """Number of live racks; 0: unknown."""
    absent: tuple[AbsentRack, ...]
    dropped: tuple[DroppedOffer, ...]
    digests: tuple[str, ...]
    reason: str
    part: float | None = None
    """The part of a full round that it counts as, by tokens; none for a round of moments."""
    rounds: float | None = None
    """Rounds that the fragment had merged before."""
    momentum: float | None = None
    balance: float | None = None
    """Elements of the offers with the sign of the outer momentum of their base, minus those with
    the other sign, relative to both; none: nothing was compared."""
    moments: bool = False
    """Whether it merged the optimizer's moments. Its tokens are those of the weights' rounds."""
    closed_by: str = ""
    """The first word of `reason`, which says why the round did not wait longer."""


class RoundDropped(WarningEvent, frozen=True, tag="drop"):
    """Coordinator: offers end without a commit: too old, or not fit to be merged."""

    says = "offers of fragment {fragment} by racks {racks} are dropped: {reason}"
    remedy = "see docs/troubleshooting.md, A rack has diverged"
    fragment: Whole
    racks: tuple[Whole, ...]
    reason: str


class DigestDiffers(ErrorEvent, frozen=True, tag="differs"):
    says = "fragment {fragment} version {version} has digest {mine} here, and {log} in the log"
    remedy = "see docs/troubleshooting.md, The digest differs"
    fragment: Whole
    version: Whole
    mine: str
    log: str


class VersionApplied(DebugEvent, frozen=True, tag="applied"):
    """The rack trains on the new version; `fate` is that of its own offer."""

    says = "trains on version {version} of fragment {fragment} from step {step} on"
    step: Whole
    fragment: Whole
    version: Whole
    fate: Fate
    """Fate of the own offer: the commit named it, it was dropped, or there was none."""
    seq: Whole


class OfferDiscarded(InfoEvent, frozen=True, tag="discarded"):
    """An own offer ended without a commit."""

    says = "offer {seq} of fragment {fragment} ends unmerged at step {step}; " + STAYS
    step: Whole
    fragment: Whole
    seq: Whole


class RackDiverged(ErrorEvent, frozen=True, tag="diverged"):
    """This rack ends with [`Diverged`](troubleshooting.md#a-rack-has-diverged)."""

    says = "this rack has diverged at step {step}, fragment {fragment}: {reason}"
    remedy = "see docs/troubleshooting.md, A rack has diverged"
    step: Whole
    fragment: Whole
    reason: str


class StallOver(WarningEvent, frozen=True, tag="stall-over"):
    """The training thread waited until its budget was used up, without a result."""

    says = (
        "training waited {ms} ms at step {step} for fragments {fragments}, without a result: {why}"
    )
    remedy = "see docs/troubleshooting.md, Training is slow"
    step: Whole
    fragments: tuple[Whole, ...]
    ms: Whole
    why: tuple[str, ...]
    times: Whole = 0
    """In a warning: the number of waits whose sum `ms` is."""
    within_s: Whole = 0
    """In a warning: the time within which they were."""


class SameData(WarningEvent, frozen=True, tag="same-data"):
    """Offers of these racks had equal bits in two rounds: they train on the same data, as where
    a loader is sharded by the ranks of a rack only; `dataset.shard(num_shards=racks,
    index=rack)` first."""

    says = "racks {racks} made offers with equal bits: they train on the same data"
    remedy = (
        "give each rack its own part of the data, such as dataset.shard(num_shards=racks, "
        "index=rack)"
    )
    racks: tuple[Whole, ...]


class RoundsShort(WarningEvent, frozen=True, tag="rounds-short"):
    """For half a minute, more than half of the newest rounds merged fewer racks than were live."""

    says = "{of_the_last}"
    remedy = (
        "a longer overlap_steps or grace_window_ms, codec='int4', or lockstep=True; "
        "see docs/tuning.md, Are the racks merged together"
    )
    of_the_last: str


class RacksApart(WarningEvent, frozen=True, tag="racks-apart"):
    """The deltas of the racks point apart, so each learns towards a model of its own; once."""

    says = "deltas of two racks have a mean cosine of {cosine} in {merges} merges: they point apart"
    remedy = "give all racks parts of one mixture of the data"
    merges: Whole
    cosine: float


class OffersGrow(WarningEvent, frozen=True, tag="offers-grow"):
    """The offers of a fragment are that many times as large per step as at the peak from which they
    had fallen, as where the outer momentum or a learning rate is too high; once."""

    says = (
        "offers of fragment {fragment} are {growth} times as large per step as at their peak before"
    )
    remedy = (
        "a lower outer_optimizer_momentum (the default fits the period) or learning rate, unless "
        "you raised that meanwhile"
    )
    fragment: Whole
    version: Whole
    growth: float


class StepsLate(WarningEvent, frozen=True, tag="late-steps"):
    """At the end: the last offer added more than a period of steps that the rack had made on an
    old version ([why](troubleshooting.md#the-merged-model-is-worse-than-a-rack-alone))."""

    says = "{reason}"
    remedy = "see docs/troubleshooting.md, The merged model is worse than a rack alone"
    steps: Whole
    reason: str


class LastRoundsAlone(WarningEvent, frozen=True, tag="last-rounds-alone"):
    """At the end: so many last rounds merged this rack alone, three or more of one fragment and
    a tenth of its tokens, since that step of it; when the others ended or were last merged."""

    says = (
        "the last {rounds} rounds merged rack {alone} alone, {tokens} tokens, from its capture at "
        "step {since_step} on ({others}): they moved the model by its data only"
    )
    remedy = (
        "let the racks end at the same time; see docs/troubleshooting.md, The merged model is "
        "worse than a rack alone"
    )
    alone: Whole
    rounds: Whole
    tokens: Whole
    since_step: Whole
    others: tuple[str, ...]


class StatisticsReset(WarningEvent, frozen=True, tag="statistics-reset"):
    """Running statistics had met an infinity or NaN, as in a step that a GradScaler skips, and
    would have stayed NaN; they are the racks' last mean again."""

    says = "{buffers} contained NaN or Inf at step {step}, and are the last mean of the racks again"
    remedy = "look for a loss that is NaN or a learning rate that is too high"
    step: Whole
    buffers: str


class PullsUnderWay(LoudEvent, frozen=True, tag="pulling"):
    """Every 5 s: how far rack `peer` is with bytes that others wait for, at the start, at the
    end, or as it joins. The wait goes on while bytes arrive, whatever the time-outs say."""

    says = "rack {peer} has pulled {mb} of {of_mb} MB, at {mb_per_s} MB/s, {left_s} s left"
    peer: Whole
    mb: float
    of_mb: float
    mb_per_s: float
    left_s: int | Literal["unknown"]


class PayloadPulled(DebugEvent, frozen=True, tag="pulled"):
    """A pull from this rack is complete; its own number: a copy of a version or a state."""

    says = "{bytes} bytes of rack {rack} arrived in {ms} ms"
    rack: Whole
    bytes: Whole
    ms: float


class PullsFail(WarningEvent, frozen=True, tag="pulls-fail"):
    """At least 3 pulls in a row from this lane have failed over at least 5 s."""

    says = "no pull from {from} succeeds, {failures} failed: {error}"
    remedy = PULLS_PAGE
    holder: str = field(name="from")
    failures: Whole
    error: str


class PullsWork(LoudEvent, frozen=True, tag="pulls-work"):
    says = "pulls from {from} succeed again"
    holder: str = field(name="from")


# ------------------------------------------------------------------ a rack that joins


class RackJoined(LoudEvent, frozen=True, tag="joined"):
    says = "this rack has joined, and trains on versions {versions}"
    versions: tuple[Whole, ...]


class VersionCopied(InfoEvent, frozen=True, tag="copied"):
    says = "fragment {fragment} version {version} was copied from another rack"
    fragment: Whole
    version: Whole


class VersionCopyFailed(InfoEvent, frozen=True, tag="copy-failed"):
    """The state did not come, or had other bits; it is tried again."""

    says = "fragment {fragment} version {version} could not be copied yet: {error}"
    fragment: Whole
    version: Whole
    error: str


class StateGiven(InfoEvent, frozen=True, tag="state-given"):
    """A donor has copied its [training state](joining.md) for a joining rack, or cannot."""

    says = "the training state of step {step} was copied for rack {to}: {bytes} bytes, {ms} ms"
    to: Whole
    step: Whole
    bytes: Whole
    ms: Whole
    kept_by: str = ""
    """The rank that keeps the copy, if it is not this one."""
    refused: str = ""
    """Why there is no copy."""


class TrainingStateCopied(LoudEvent, frozen=True, tag="state-copied"):
    says = "{of} continue as on rack {donor} at step {step}"
    donor: Whole
    step: Whole
    digest: str
    bytes: Whole
    of: tuple[str, ...]


class StateCopyFailed(WarningEvent, frozen=True, tag="state-copy-failed"):
    """A pull of the state failed; it is tried again."""

    says = "the training state of rack {donor} at step {step} could not be copied: {error}"
    remedy = PULLS_PAGE
    donor: Whole
    step: Whole
    error: str


class StateFresh(WarningEvent, frozen=True, kw_only=True, tag="state-fresh"):
    """A joining rack's optimizer, or a registered object, begins fresh."""

    says = "{name} begins fresh: {reason} {effect}"
    remedy = "see docs/joining.md, What a joining rack gets"
    name: str
    scope: str = ""
    reason: str
    effect: str = ""

    def sentence(self) -> str:
        return f"{self.name} begins fresh: {self.reason}" + (self.effect and f"; {self.effect}")


class StateLoaded(InfoEvent, frozen=True, tag="state-loaded"):
    """A registered object has the state of a donor, of a
    [mirror](joining.md#state-of-one-rack), or of a checkpoint."""

    says = "{name} continues with the state of {of}"
    name: str
    scope: str
    of: str


class StateUnclaimed(WarningEvent, frozen=True, tag="state-unclaimed"):
    says = "{of} has a state of {names}, which this script has not registered"
    remedy = "call runtime.register_state with this name before the first step"
    names: tuple[str, ...]
    of: str


class OptimizerMadeEqual(WarningEvent, frozen=True, tag="made-equal"):
    says = "hyperparameters of {optimizer} became the donor's: {changed}"
    remedy = "start all racks with the same hyperparameters"
    optimizer: str
    changed: tuple[str, ...]
    and_more: Whole = 0


class MirrorKept(InfoEvent, frozen=True, tag="mirror-kept"):
    """This rank keeps the objects that rack `peer` registered with scope rack, as of its capture
    after `step`; that capture is merged."""

    says = "keeps the state of rack {peer} at its step {step}, {bytes} bytes"
    peer: Whole
    step: Whole
    bytes: Whole


class MirrorMissed(InfoEvent, frozen=True, tag="mirror-missed"):
    """The objects could not be fetched; the previous ones are kept."""

    says = "the state of rack {peer} at its step {step} could not be fetched: {error}"
    peer: Whole
    step: Whole
    error: str


class MirrorFailed(WarningEvent, frozen=True, tag="mirror-failed"):
    """The second failed fetch in a row; logged once until one succeeds. If rack `peer` returned
    now, it would begin at step `kept` of its data, or fresh if `kept` is `none`. `error` has the
    reason: look at the link to that rack."""

    says = (
        "the state of rack {peer} at its step {step} could not be fetched again: {error}; kept is "
        "that of step {kept}"
    )
    remedy = PULLS_PAGE
    peer: Whole
    step: Whole
    error: str
    kept: str


class MirrorLoaded(LoudEvent, frozen=True, tag="mirror-loaded"):
    """A joining rack has its own state of scope rack back, as of `step`, from rack `peer`."""

    says = "{of} continue at step {step} of this rack's former life, kept by rack {peer}"
    peer: Whole
    step: Whole
    digest: str
    bytes: Whole
    of: tuple[str, ...]


class MirrorRefused(WarningEvent, frozen=True, tag="mirror-refused"):
    """The objects registered with scope rack cannot be mirrored now: they are too large, or of a
    type that cannot travel."""

    says = (
        "the state of step {step} is not mirrored: {reason}; other racks keep what was mirrored "
        "before, if anything was"
    )
    remedy = "register a state that can be copied; see docs/joining.md, State of one rack"
    step: Whole
    reason: str


class SchedulerRegistered(InfoEvent, frozen=True, tag="scheduler-registered"):
    """A scheduler of torch that the script has not registered was registered, as it drives this
    optimizer."""

    says = "{name} ({scheduler}) travels with the training state"
    name: str
    scheduler: str


class SchedulerRefused(WarningEvent, frozen=True, tag="scheduler-refused"):
    """The scheduler of an optimizer cannot travel with the training state: register one that can,
    or save it yourself."""

    says = "{name} ({scheduler}) does not travel with the training state: {reason}"
    remedy = "call runtime.register_state('scheduler', ...) with a state that can be copied"
    name: str
    scheduler: str
    reason: str


class RatesDiffer(WarningEvent, frozen=True, tag="rates-differ"):
    """The learning rates before the first step are not those of the checkpoint: a scheduler
    begins anew."""

    says = "the learning rates of {optimizer} were {saved} in the checkpoint, and are {now}"
    remedy = (
        "a scheduler that begins anew has set them: load its state as the script saved it, or call "
        "runtime.register_state('scheduler', scheduler) after mend_init, for the next checkpoint"
    )
    optimizer: str
    saved: tuple[float, ...]
    now: tuple[float, ...]


# ------------------------------------------------------------------ checkpoints


class CheckpointMarked(InfoEvent, frozen=True, tag="mark"):
    """Coordinator: the place of a checkpoint in the log; later: all racks have written it."""

    says = "checkpoint {number} ({name}) of racks {racks}; written by all: {written}"
    number: Whole
    name: str
    racks: tuple[Whole, ...]
    written: bool


class RowsCounted(DebugEvent, frozen=True, tag="data"):
    """Rows of the data ledger, from a rack's leader, after each record that changes them. `epoch`:
    the first whose rows are not all done, where there are several."""

    says = "{done} rows are done, {open} open, {left} left; {again} were given out again; {epoch}"
    done: Whole
    open: Whole
    left: Whole
    again: Whole
    epoch: str = "one epoch"


class RowsAwaited(LoudEvent, frozen=True, tag="rows-awaited"):
    """Every 5 s while training waits for rows of the data ledger."""

    says = "training waits after step {step} for rows: {why}"
    step: Whole
    why: str


class RowsLeft(LoudEvent, frozen=True, tag="rows-left"):
    """When a rack has merged all its work and ends: rows that no rack took, or of lost work."""

    says = "the merged weights lack {left} rows of the data ledger, of {rows} in all epochs"
    left: Whole
    rows: Whole


class CheckpointWritten(InfoEvent, frozen=True, tag="checkpoint"):
    """A checkpoint is complete. Training waited for the first two times: until all racks reached
    it, and while the state was taken; the third is the writing."""

    says = "checkpoint {number} of step {step} is in {folder}"
    folder: str
    step: Whole
    number: Whole
    versions: tuple[Whole, ...]
    cut_ms: Whole
    taken_ms: Whole
    written_ms: Whole


class CheckpointMoved(WarningEvent, frozen=True, tag="checkpoint-moved"):
    """A checkpoint without `save=` applied merged weights in the call: a model that was saved
    before it (HF's `on_save`) is not the one of the checkpoint and cannot be resumed."""

    says = "the weights moved while checkpoint {folder} was made"
    remedy = (
        "what other racks had merged was applied in this call, so a model that was saved before it "
        "has other weights and cannot be resumed: save it in `save=`, or after this call. In a "
        "callback of HF's Trainer call it in on_step_end when control.should_save is set, before "
        "the files are written, not in on_save"
    )
    folder: str


class CheckpointFailed(InfoEvent, frozen=True, tag="checkpoint-failed"):
    """A background checkpoint that the end of the script waited for is not complete, with the
    reason."""

    says = "{error}"
    error: str


class StateDictTaken(InfoEvent, frozen=True, tag="state-dict"):
    """`runtime.checkpoint_state` has taken the state of this rank, with all racks at one place of
    the log."""

    says = "the state of checkpoint {number} was taken at step {step}"
    step: Whole
    number: Whole
    versions: tuple[Whole, ...]


class RackResumed(InfoEvent, frozen=True, tag="resumed"):
    says = "resumes {folder} at step {step}, with {open_tokens} tokens that are not merged yet"
    folder: str
    step: Whole
    versions: tuple[Whole, ...]
    open_tokens: float
    """Averaged over fragments."""


class ResumeLost(WarningEvent, frozen=True, tag="resume-lost"):
    """A rack's part of the checkpoint is not used; the tokens that only it had, averaged over
    fragments, if known."""

    says = "the open work of rack {lost} in the checkpoint is lost, {open_tokens} tokens"
    remedy = "resume on all racks of the checkpoint to keep what only one of them had"
    lost: Whole
    open_tokens: float | None
    """None: its part of the checkpoint is not available."""
    racks: Whole = 0
    """Number of racks of the job, if it has fewer now; 0: this rack has no part to resume."""

    def sentence(self) -> str:
        if not self.racks:
            return (
                f"rack {self.lost} has no part of the checkpoint: it begins with a copy of the "
                "others' weights; what only it had is lost"
            )
        return f"rack {self.lost}: the job has {self.racks} racks now; what only it had is lost"


class ResumeRecut(LoudEvent, frozen=True, tag="resume-recut"):
    """The checkpoint was written by another number of [ranks per
    rack](checkpoints.md#another-number-of-ranks-per-rack) (then, now); its slices are cut again."""

    says = (
        "the checkpoint is of another number of ranks per rack ({ranks}, then and now): parts of "
        "ranks are cut anew; what is registered with scope rack begins fresh"
    )
    ranks: tuple[Whole, ...]


class ResumeIgnored(WarningEvent, frozen=True, tag="resume-ignored"):
    """The rack joins a running job and does not use its part of the checkpoint."""

    says = "the checkpoint was not loaded: {reason}; {open_tokens} open tokens are given up"
    remedy = "to resume the checkpoint, stop all racks and start them together"
    reason: str
    open_tokens: float


# ------------------------------------------------------------------ slow racks and links


def _ratio_of(against: Against) -> str:
    return "its own past" if against == "own past" else "the median of the other racks"


def _rank_of(rack: int, rank: int | None) -> str:
    return f"rack {rack}" + (f" rank {rank}" if rank is not None else "")


class RackSlow(WarningEvent, frozen=True, kw_only=True, tag="fail-slow"):
    """A rack has become [slow](failslow.md), relative to its own past or its peers, or is no
    longer slow. A warning from a ratio of 1.5 on; below it, at level INFO."""

    says = "rack {slow_rack} rank {slow_rank} is slow: {ratio}x the time per token of {against}"
    remedy = "see docs/failslow.md, Responses"
    slow_rack: Whole
    slow_rank: Whole | None = None
    """None: the rack as a whole is slower than the others."""
    against: Against
    """peers: the median of the other racks."""
    step: Whole
    """The step at which it was found."""
    since_step: Whole | None = None
    ratio: float
    probability: float | None = None
    """Probability that its own speed changed."""

    def sentence(self) -> str:
        who, against = _rank_of(self.slow_rack, self.slow_rank), _ratio_of(self.against)
        text = f"{who} is slow: {self.ratio}x the time per token of {against}"
        text += f", since its step {self.since_step}" if self.since_step is not None else ""
        sure = f", {100 * self.probability:.2f} % sure" if self.probability is not None else ""
        return f"{text}; found at step {self.step}{sure}"


class RackSlowOver(LoudEvent, frozen=True, kw_only=True, tag="fail-slow-over"):
    says = "rack {slow_rack} rank {slow_rank} is no longer slower than {against}, at step {step}"
    slow_rack: Whole
    slow_rank: Whole | None = None
    against: Against
    step: Whole
    since_step: Whole
    ratio: float | None = None

    def sentence(self) -> str:
        who, against = _rank_of(self.slow_rack, self.slow_rank), _ratio_of(self.against)
        return f"{who} is no longer slower than {against}, at its step {self.step}"


class RackSlowCause(WarningEvent, frozen=True, kw_only=True, tag="fail-slow-cause"):
    """A micro-benchmark has found [the cause](failslow.md#verdicts); unmeasured fields are
    left out."""

    says = "rack {slow_rack} rank {slow_rank} is slow by its {cause}"
    remedy = "see docs/failslow.md, Verdicts"
    slow_rack: Whole
    slow_rank: Whole
    cause: Literal["compute", "link", "input", "unknown"]
    link_to: Number = -1
    """The rack at the other end, if a link is the cause."""
    ratio: float
    gemm_ratio: float | None = None
    """Time of a matrix product over that of the healthy rank; None: not measured."""
    input_share: float | None = None
    """The part of the extra step time that passes before the forward."""
    lane_ratios: dict[str, float] = field(default_factory=dict)
    """Rack -> time of a pull from it over that of the healthy rank."""

    def sentence(self) -> str:
        cause = cause_in_words(self.cause, self.slow_rank, self.link_to)
        text = f"rack {self.slow_rack} rank {self.slow_rank} is slow {cause}"
        if self.gemm_ratio is not None:
            text += f"; a matrix product takes {self.gemm_ratio} times as long"
        if self.input_share is not None:
            share = "the share before its forward is"
            text += f"; of what a step takes longer, {share} {self.input_share}"
        if self.lane_ratios:
            text += f"; pulls from other racks take, times as long: {shown(self.lane_ratios)}"
        return text


class LinkSlow(WarningEvent, frozen=True, tag="slow-link"):
    """Pulls by this rank of rack `to_rack` from rack `from_rack` take [more than twice as
    long](failslow.md#verdicts) as before, or no longer do."""

    says = (
        "the link {from_rack} -> {to_rack} is slow: pulls by rank {rank} of rack {to_rack} take "
        "{ratio}x the time per byte of its own past, since its step {since_step}"
    )
    remedy = "see docs/failslow.md, Verdicts"
    from_rack: Whole
    to_rack: Whole
    rank: Whole
    step: Whole
    """A step of the rack that pulls."""
    since_step: Whole
    ratio: float
    probability: float
    mb_s: float

    def sentence(self) -> str:
        sure = f"{100 * self.probability:.2f} % sure"
        return f"{super().sentence()}; found at step {self.step}, {sure}; {self.mb_s} MB/s"


class LinkSlowOver(LoudEvent, frozen=True, tag="slow-link-over"):
    says = (
        "the link {from_rack} -> {to_rack} is as fast as it was, as rank {rank} of rack {to_rack} "
        "pulls at its step {step}"
    )
    from_rack: Whole
    to_rack: Whole
    rank: Whole
    step: Whole
    since_step: Whole
    ratio: float


class RackMitigated(WarningEvent, frozen=True):
    """A change of the mitigation of a slow rack. Base of the next kinds, not a kind itself."""

    slow_rack: Whole
    stage: Whole
    batch_pct: Whole
    reason: str


class RackNotAwaited(RackMitigated, frozen=True, tag="slow-rack-left"):
    """With `failslow_action="act"` or `"evict"`: rounds [no longer
    wait](failslow.md#responses) for a slow rack, or wait again."""

    says = "rack {slow_rack} is not waited for any more: {reason}"
    remedy = "see docs/failslow.md, Responses"


class RackAwaited(RackMitigated, frozen=True, tag="slow-rack-awaited"):
    says = "rack {slow_rack} is waited for again: {reason}"
    remedy = "see docs/failslow.md, Responses"


class RackBatchChanged(RackMitigated, frozen=True, tag="slow-rack-batch"):
    """With `failslow_action="act"` or `"evict"`: a slow rack whose script asks takes [fewer
    micro-batches](failslow.md#fewer-micro-batches), or more of them again."""

    says = "rack {slow_rack} takes {batch_pct} % of its micro-batches: {reason}"
    remedy = "see docs/failslow.md, Fewer micro-batches"


class RackEvicted(RackMitigated, frozen=True, tag="slow-rack-evicted"):
    """With `failslow_action="evict"`: a slow rack is to [leave and be started
    again](failslow.md#eviction)."""

    says = "rack {slow_rack} is evicted, to be started again: {reason}"
    remedy = "see docs/failslow.md, Eviction"


class EvictedRackLost(RackMitigated, frozen=True, tag="evicted-rack-lost"):
    """An evicted rack has [not come back](failslow.md#eviction) for
    `seat_timeout_s`: the job stops waiting for it. It may still join."""

    says = "rack {slow_rack} is lost: {reason}"
    remedy = "see docs/failslow.md, Eviction"


class LocalBatchChanged(LoudEvent, frozen=True, tag="local-batch"):
    says = "this rack takes {batch_pct} % of its micro-batches from step {step} on: {reason}"
    step: Whole
    batch_pct: Whole
    reason: str


class RankEvicted(WarningEvent, frozen=True, tag="evicted"):
    says = "this rack was evicted after step {step}: {reason}; all its work is merged"
    remedy = "start it again: it joins with the state of another rack"
    step: Whole
    reason: str


class EvictionFailed(WarningEvent, frozen=True, tag="eviction-failed"):
    """Its work could not be merged in time, or it is needed after all: it trains on, and a
    `slow-rack-awaited` reverts the eviction."""

    says = "this rack was to be evicted at step {step} ({reason}), and trains on: {detail}"
    remedy = "see docs/failslow.md, Eviction"
    step: Whole
    reason: str
    detail: str


# ------------------------------------------------------------------ the end


class EndAwaited(LoudEvent, frozen=True, tag="leaving"):
    """Every 5 s while this rack waits for the others to finish."""

    says = "this rack is done, and waits at most {at_most_s} s for {for}"
    what: str = field(name="for")
    at_most_s: Whole


class LeftAlone(WarningEvent, frozen=True, tag="left-alone"):
    says = "this rack ends and no other has confirmed it: {why}"
    remedy = "see docs/troubleshooting.md, The model kept its own weights at shutdown"
    why: tuple[str, ...]
    open_tokens: float
    """Averaged over fragments."""


class WeightsKept(ErrorEvent, frozen=True, tag="kept-local"):
    says = (
        "the model keeps its own weights, with {open_tokens} tokens that are not merged: {reason}"
    )
    remedy = (
        "save this model; see docs/troubleshooting.md, The model kept its own weights at shutdown"
    )
    open_tokens: float
    reason: str


class DrainGaveUp(WarningEvent, frozen=True, tag="drain-gave-up"):
    says = "{detail}; {open_tokens} tokens are not merged"
    remedy = "see docs/troubleshooting.md, The model kept its own weights at shutdown"
    detail: str
    open_tokens: float


class RankEnded(InfoEvent, frozen=True, tag="ended"):
    """How the rack left the job."""

    says = "ended {outcome} at step {step}: {tokens_merged} of {tokens} tokens are merged"
    outcome: str
    detail: str
    step: Whole
    tokens: Whole
    tokens_merged: float
    """Averaged over fragments."""


class RankEndedUnmerged(ErrorEvent, frozen=True, tag="ended-unmerged"):
    says = "ended {outcome} at step {step}: {tokens_merged} of {tokens} tokens are merged. {detail}"
    remedy = "save this model before the rack is started again; see docs/api.md, mend_shutdown"
    outcome: str
    detail: str
    step: Whole
    tokens: Whole
    tokens_merged: float


class CloseGaveUp(WarningEvent, frozen=True, tag="close-gave-up"):
    """Threads that were still busy when the end had waited long enough."""

    says = "threads {left} still run, and were not waited for any longer"
    remedy = "end the process; report it with its events file if it repeats"
    left: tuple[str, ...]


# ------------------------------------------------------------------ files, log, tape, status


class EventsCut(InfoEvent, frozen=True, tag="events-cut"):
    """In the file only: the events from before those in `path` were deleted, as both halves were
    full."""

    says = "the oldest events ({path}) were deleted here"
    path: str


class EventsStopped(WarningEvent, frozen=True, tag="events-stopped"):
    """In the log only: the events file cannot be written for now."""

    says = "{path} cannot be written: {reason}"
    remedy = "{remedy}"
    path: str
    reason: str
    action: str = field(name="remedy")


class EventsResumed(LoudEvent, frozen=True, tag="events-resumed"):
    """In the log only: it can be written again."""

    says = "{path} is written again; {lost} events are lost"
    path: str
    lost: Whole


class EventsAnew(WarningEvent, frozen=True, tag="events-anew"):
    says = "{path} was created again: {reason}"
    remedy = "leave the files of a running job where they are"
    path: str
    reason: str


class EventsLost(WarningEvent, frozen=True, tag="events-lost"):
    """This many events are missing here; in the log, at the end: with the reason."""

    says = "{count} events are not in the file: {reason}"
    remedy = "use a disk that answers and has space"
    count: Whole
    reason: str = "they came faster than the file could be written"


class LogLost(WarningEvent, frozen=True, tag="log-lost"):
    says = "{lines} lines of the log are lost, because nobody read them"
    remedy = "see docs/monitoring.md"
    lines: Whole


class StatusUnanswered(WarningEvent, frozen=True, tag="observer-unanswered"):
    """A bug in the status for `mend top`; training goes on."""

    says = "status clients get no answer: {reason}"
    remedy = REPORT
    reason: str


class TapeWithoutBase(WarningEvent, frozen=True, tag="tape-no-base"):
    """The state of the machines could not be put at the beginning of a file of the
    [tape](internals/tape.md): if the files before it are deleted, a replay begins at a later
    one."""

    says = "a replay cannot begin at this file of the tape: {reason}"
    remedy = REPORT
    reason: str


class TapeGap(WarningEvent, frozen=True, tag="tape-gap"):
    """This many events are not on the [tape](internals/tape.md): the disk was too slow."""

    says = "{events} events are missing on the tape: {reason}"
    remedy = "use a faster disk for diagnostics_dir"
    events: Whole
    reason: str


class TapeStopped(WarningEvent, frozen=True, tag="tape-stopped"):
    """The tape ends here (disk full, no permission, a `diagnostics_dir` that cannot be made, a
    removed file); training goes on."""

    says = "the tape {path} stops: {reason}"
    remedy = "{remedy}"
    path: str
    reason: str
    action: str = field(name="remedy")
