"""The status of a rank at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from mend.consensus.records import Policy, Units
from mend.consensus.units import done_by_epoch
from mend.coordination.messages import FailSlow
from mend.coordination.slow import OWN_PAST, PEERS


@dataclass(frozen=True, slots=True)
class TokenLedger:
    """Tokens that this rank has trained, averaged over fragments: merged + open + discarded."""

    merged: float
    open: float
    """Trained since the last merged capture: they are in this rack's weights, and in its next
    offer."""
    discarded: float
    """Given up by apply_mode overwrite; 0 with carry."""


@dataclass(frozen=True, slots=True)
class DataRows:
    """Rows of a `DataLedger` according to the log. Their total is done + open + left."""

    done: int
    """Their work is merged into all fragments, except for what a codec left out. The rack sends
    that later; it is lost if the rack dies."""
    open: int
    """Given to a rack and not done."""
    left: int
    """Given to no rack."""
    given_again: int
    """Given out again because a rack lost its seat."""
    done_by_epoch: tuple[int, ...]
    """Rows that are done, per epoch. Racks may begin an epoch while others still train rows of the
    one before."""

    @property
    def epoch(self) -> int:
        """The first epoch whose rows are not all done; the last one if all are."""
        whole = self.rows // len(self.done_by_epoch)
        undone = (at for at, done in enumerate(self.done_by_epoch) if done < whole)
        return next(undone, len(self.done_by_epoch) - 1)

    @property
    def rows(self) -> int:
        """Rows of all epochs."""
        return self.done + self.open + self.left

    @property
    def of_epoch(self) -> str:
        """The progress in that epoch, as text."""
        epochs = len(self.done_by_epoch)
        if epochs == 1:
            return "one epoch"
        done = f"{self.done_by_epoch[self.epoch]} of {self.rows // epochs} rows done"
        return f"epoch {self.epoch} of {epochs}: {done}"


def data_rows(units: Units, policy: Policy) -> DataRows:
    """The rows of a job: a unit has one for each rank of a rack."""
    ranks, left = policy.ranks, sum(count for _, count in units.free)
    return DataRows(
        done=ranks * units.done,
        open=ranks * units.open,
        left=ranks * left,
        given_again=ranks * units.again,
        done_by_epoch=tuple(ranks * done for done in done_by_epoch(units, policy.epochs)),
    )


@dataclass(frozen=True, slots=True)
class SlowRack:
    """A verdict in force."""

    rack: int
    rank: int
    """The slowest of its ranks; if `cause` is known, the rank to blame."""
    against: str
    """ "own past" or "peers", the median of the other racks."""
    since_step: int
    ratio: float
    """Step time per token over that of its past, or of its peers."""
    probability: float
    """Probability that its own speed changed; 1.0 for a comparison with peers."""
    cause: str = ""
    """compute, link, input or unknown; empty: not validated (yet)."""
    link_to: int | None = None
    """The rack at the other end, if a link is the cause."""
    of_link: bool = False
    """Whether a link is slow and not the steps of the rack: pulls from it by rank `rank` of rack
    `link_to` take `ratio` times as long per byte. `since_step` is a step of rack `link_to`."""


def slow_rack(verdict: FailSlow) -> SlowRack:
    return SlowRack(
        rack=verdict.rack,
        rank=verdict.rank,
        against=OWN_PAST if verdict.own_past else PEERS,
        since_step=verdict.since_step,
        ratio=verdict.ratio_tenths / 10,
        probability=verdict.sure_milli / 1000,
        cause=verdict.cause,
        link_to=verdict.link_to if verdict.link_to >= 0 else None,
        of_link=verdict.of_link,
    )


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one rank. Times are wall-clock milliseconds of the training thread."""

    rack: int
    rank: int
    step: int
    tokens: int
    versions: tuple[int, ...]
    """Per fragment, the version this rank trains on."""
    rounds_committed: int
    rounds_missed: dict[str, int]
    """reason -> how often this rack's work was not in the round it was meant for."""
    ledger: TokenLedger
    tokens_merged_share: float
    racks_configured: int
    racks_live: tuple[int, ...]
    racks_merged: tuple[int, ...]
    """Members of the newest commit."""
    closed_by: str
    """Why the round of the newest commit did not wait longer: the `reason` of its event."""
    stall_ms_total: float
    stall_ms_last: float
    host_bytes: int
    """Memory for anchors, offers and rounds in flight; page-locked if the model is on a GPU."""
    device_bytes_peak: int
    """Peak of the GPU memory that mend has used; 0 on the CPU."""
    bytes_sent: int
    bytes_received: int
    anchor_digest: str
    """sha256 over the version and digests of every fragment. Racks at equal versions have equal
    ones."""
    waiting: tuple[str, ...]
    """Why open rounds do not close, according to the coordinator; empty if nothing waits."""
    async_tp: str
    """ "off", "on: N fused matmul-collectives", or "not active: " and the reason."""
    frames_refused: int
    events_lost: int
    """Events that are not in the file: lost, or waiting while it cannot be written."""
    last_error: str = ""
    outcome: str = "running"
    """How this rank left the job, one of `WORDS` in `engine/state/outcome.py`. "merged": all its
    work is in the model that every rack has."""
    outcome_detail: str = ""
    rounds_by_racks: dict[int, int] = field(default_factory=dict)
    """Number of racks merged -> number of such rounds, of all rounds that this rank has read."""
    rounds_recent: tuple[tuple[int, int], ...] = ()
    """(racks merged, live racks or 0 if unknown) of the newest rounds, oldest first; at most 20."""
    outer_rounds: float = 0.0
    """Rounds that the fragment of the newest commit had merged before it, by which the momentum
    ramps up."""
    outer_momentum: float = 0.0
    """Momentum of the newest commit's outer step."""
    codec: str = "float32"
    """Codec of offers."""
    payload_bytes: int = 0
    """Bytes of all offers of weights that this rank has encoded; each is sent to every other
    rack."""
    moment_bytes: int = 0
    """The same for what is averaged: the optimizer's moments, and running statistics."""
    payload_bytes_fp32: int = 0
    """Size of the same offers as fp32."""
    residual_share: float = 0.0
    """Part of the newest offer that the codec left for a later one, as a ratio of lengths."""
    protection: str = "loopback"
    """What protects the rack's port: "keys", "loopback" (only this host can reach it), or
    "insecure"."""
    log_lines_lost: int = 0
    """Lines of the log that were lost because its pipe was full or closed."""
    slow: tuple[SlowRack, ...] = ()
    """Racks that are slow according to the coordinator, ascending."""
    joined_state: str = ""
    """For a rack that joined a running job: "copied from rack 0 at step 124", or "fresh: " and the
    reason why its optimizer and registered objects began anew. With objects of scope rack, also
    where those are from. Empty: it began with the others."""
    mirror_bytes: int = 0
    """Memory of this rank for the objects that another rack has registered with scope rack."""
    bytes_relayed: int = 0
    """Bytes that this process has relayed between other racks and ranks of its own rack, in both
    directions: with a single port in data_ports, and ranks on several hosts. Not included in
    bytes_sent."""
    data: DataRows | None = None
    """Rows of the data ledger; None: there is none."""
