"""Status: the state of a rank at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from mend.consensus.records import Policy, Units
from mend.consensus.units import done_by_epoch
from mend.coordination.messages import FailSlow
from mend.coordination.slow import OWN_PAST, PEERS


@dataclass(frozen=True, slots=True)
class TokenLedger:
    """Tokens of this rank, averaged over fragments: merged + open + discarded = trained."""

    merged: float
    open: float
    """Trained since the last merged capture: still in this rack's weights, in the next offer."""
    discarded: float
    """Given up by apply_mode overwrite; 0 under carry."""


@dataclass(frozen=True, slots=True)
class DataRows:
    """Rows of a `DataLedger`, as the log has them: done + open + left are all of them."""

    done: int
    """Their work is merged into all fragments. What a codec left out is still owed by the rack, and
    lost if it dies."""
    open: int
    """Given to a rack, not done."""
    left: int
    """No rack has them."""
    given_again: int
    """Given out again after a rack had lost its seat."""
    done_by_epoch: tuple[int, ...]
    """Per epoch. Racks may begin one while others still train rows of the one before."""

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
        """How much of that epoch is done, as text."""
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
    """The slowest of its ranks; where `cause` is known, the one to blame."""
    against: str
    """ "own past" or "peers", which are the median of the other racks."""
    since_step: int
    ratio: float
    """Step time per token over that of its past, or of its peers."""
    probability: float
    """Probability that its own speed changed; 1.0 for a comparison with peers."""
    cause: str = ""
    """compute, link, input or unknown; empty: not validated (yet)."""
    link_to: int | None = None
    """The rack at the other end, where a link is the cause."""
    of_link: bool = False
    """Its steps are as fast as they were: what takes longer, by `ratio` per byte, are the pulls of
    rack `link_to`, rank `rank` there, from it. `since_step` is one of rack `link_to`."""


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
    """A moment of one rank. Times are wall milliseconds of the training thread."""

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
    """Why the newest commit's round did not wait longer: as `reason` in the log's line of it."""
    stall_ms_total: float
    stall_ms_last: float
    host_bytes: int
    """Memory for anchors, offers and rounds in flight, page-locked where the model is on a GPU."""
    device_bytes_peak: int
    """Most memory of the GPU that mend has taken at once; 0 on the CPU."""
    bytes_sent: int
    bytes_received: int
    anchor_digest: str
    """sha256 over version and digests of every fragment; equal on all racks at equal versions."""
    waiting: tuple[str, ...]
    """Why open rounds do not close, as the coordinator says; empty when nothing waits."""
    async_tp: str
    """ "off", "on: N fused matmul-collectives", or "not active: " and why."""
    frames_refused: int
    events_lost: int
    """Events that are not in the file: lost, or still waiting."""
    last_error: str = ""
    outcome: str = "running"
    """How this rank left the job, one of `WORDS` in `engine/state/outcome.py`: "merged" when all
    that it trained is in the model that every rack holds."""
    outcome_detail: str = ""
    rounds_by_racks: dict[int, int] = field(default_factory=dict)
    """racks merged -> rounds, of all rounds that this rank has read."""
    rounds_recent: tuple[tuple[int, int], ...] = ()
    """(racks merged, racks that lived, 0 if that is not known) of the newest rounds, oldest first;
    at most 20."""
    outer_rounds: float = 0.0
    """Rounds that the fragment of the newest commit had merged before it: what its momentum's ramp
    goes by."""
    outer_momentum: float = 0.0
    """Momentum of the newest commit's outer step."""
    codec: str = "float32"
    """Codec of offers."""
    payload_bytes: int = 0
    """Bytes of all offers of weights that this rank has encoded; each is sent to every other
    rack."""
    moment_bytes: int = 0
    """The same of what is averaged: the optimizer's moments, and running statistics."""
    payload_bytes_fp32: int = 0
    """Bytes that the same offers would have as fp32."""
    residual_share: float = 0.0
    """Part of the newest offer (length over length) that the codec left for a later one."""
    protection: str = "loopback"
    """What keeps others out: "keys", "loopback" (only this host reaches the rack's port) or
    "insecure"."""
    log_lines_lost: int = 0
    """Lines of the log that were lost: its pipe was full, or closed."""
    slow: tuple[SlowRack, ...] = ()
    """Racks that are slow by the coordinator's verdicts, ascending."""
    joined_state: str = ""
    """For a rack that joined a running job: "copied from rack 0 at step 124", or "fresh: " and why
    its optimizer and registered objects began anew; with objects of scope rack, where these are
    from. Empty: it began with the others."""
    mirror_bytes: int = 0
    """Memory of this rank for what another rack has registered with scope rack."""
    bytes_relayed: int = 0
    """Bytes that this process has carried between other racks and ranks of its own rack, both ways:
    with a single port in data_ports, and ranks on several hosts. Not in bytes_sent."""
    data: DataRows | None = None
    """Rows of the data ledger; None: there is none."""
