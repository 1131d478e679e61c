"""Converts `Status` and `JobStatus` to metrics: named numbers.

`samples_of_rank` and `samples_of_job` are pure. `flat` is for the loggers of training loops;
`metrics_server` serves the same samples to Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mend.status.messages import DataSeen, JobStatus, RackSeen, TrainingSeen
from mend.status.status import DataRows, SlowRack, Status, slow_rack

PREFIX = "mend"


@dataclass(frozen=True, slots=True)
class Metric:
    """`kind`: a counter never decreases during the life of a process. `labels`: their names."""

    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One number. `labels`: values of the labels of METRICS[name], in their order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def _gauge(meaning: str, *labels: str) -> Metric:
    return Metric("gauge", meaning, labels)


def _counter(meaning: str, *labels: str) -> Metric:
    return Metric("counter", meaning, labels)


OF_RANK: dict[str, Metric] = {
    "step": _gauge("optimizer steps"),
    "tokens": _counter("tokens that the rank has trained"),
    "tokens_merged": _gauge("of these, tokens in merged rounds"),
    "tokens_open": _gauge("of these, tokens that a later round will merge"),
    "tokens_discarded": _gauge("of these, tokens given up by apply_mode=overwrite"),
    "racks_configured": _gauge("racks of the job"),
    "racks_live": _gauge("racks that the coordinator hears"),
    "racks_merged": _gauge("racks in the newest round"),
    "rounds_committed": _counter("rounds that the rank has read from the log"),
    "rounds_by_racks": _counter("the same by number of merged racks", "racks"),
    "rounds_missed": _counter("rounds meant to include the rack's work that did not", "reason"),
    "waiting_reasons": _gauge("reasons why open rounds do not close"),
    "stall_seconds": _counter("time that training waited for mend"),
    "sent_bytes": _counter("bytes sent by the rank"),
    "received_bytes": _counter("bytes received by the rank"),
    "relayed_bytes": _counter("bytes carried for other ranks of the rack"),
    "payload_bytes": _counter("bytes of encoded offers of weights"),
    "payload_fp32_bytes": _counter("bytes of the same offers as fp32"),
    "moment_bytes": _counter("bytes of encoded offers of moments and statistics"),
    "residual_share": _gauge("part of the newest offer that the codec left for a later one"),
    "outer_momentum": _gauge("momentum of the newest outer step"),
    "host_memory_bytes": _gauge("host memory for anchors, offers and rounds in flight"),
    "device_memory_peak_bytes": _gauge("most GPU memory that mend took at once"),
    "mirror_bytes": _gauge("memory for the registered state of another rack"),
    "data_rows": _gauge(
        "rows of the data ledger, all epochs: done, open (given to a rack) or left", "state"
    ),
    "data_rows_given_again": _gauge("rows given out again, as a rack had lost its seat"),
    "frames_refused": _counter("frames refused"),
    "events_lost": _counter("events that are not in the file"),
    "log_lines_lost": _counter("lines of the log without a reader"),
    "slow_ratio": _gauge(
        "a fail-slow verdict in force: step time per token over that of its past or its peers",
        "rack", "against", "cause",
    ),
}  # fmt: skip
"""name -> metric that comes from `Status`."""

OF_JOB: dict[str, Metric] = {
    "state": _gauge("1: starting, running, leaving or ended", "state"),
    "coordinates": _gauge("1: this process is the coordinator"),
    "ballot": _gauge("epoch of the coordinator"),
    "log_records": _gauge("records of the replicated log"),
    "versions_decided": _gauge("decided versions, all fragments"),
    "rounds_in_flight": _gauge("rounds in flight"),
    "racks_missing": _gauge("racks that the start waits for"),
    "racks_evicted": _gauge("racks that were evicted and have not come back"),
    "racks_retired": _gauge("racks that were retired"),
    "racks_refused": _gauge("racks that were refused and are absent"),
    "rack_live": _gauge("1: the coordinator hears the rack", "rack"),
    "rack_step": _gauge("step of the rack in its newest report", "rack"),
    "rack_step_seconds": _gauge("time per step without mend's waits, slowest rank", "rack"),
    "rack_behind_versions": _gauge("decided versions that the rack does not hold yet", "rack"),
    "rack_silent_seconds": _gauge("time since the rack was heard (coordinator)", "rack"),
    "step_age_seconds": _gauge("time since the last step ended"),
    "steps_per_second": _gauge("over the last five seconds"),
    "tokens_per_second": _gauge("over the last five seconds, leader's rank"),
    "sent_bytes_per_second": _gauge("over the last five seconds, leader's rank"),
    "received_bytes_per_second": _gauge("over the last five seconds, leader's rank"),
    "recorded": _gauge("the newest values of runtime.record", "name"),
}
"""name -> metric that comes from `JobStatus`."""

METRICS = OF_RANK | OF_JOB


def samples_of_rank(status: Status) -> Iterator[Sample]:
    """Samples of OF_RANK."""
    ledger = status.ledger
    plain = {
        "step": status.step,
        "tokens": status.tokens,
        "tokens_merged": ledger.merged,
        "tokens_open": ledger.open,
        "tokens_discarded": ledger.discarded,
        "racks_configured": status.racks_configured,
        "racks_live": len(status.racks_live),
        "racks_merged": len(status.racks_merged),
        "rounds_committed": status.rounds_committed,
        "waiting_reasons": len(status.waiting),
        "stall_seconds": status.stall_ms_total / 1e3,
        "sent_bytes": status.bytes_sent,
        "received_bytes": status.bytes_received,
        "relayed_bytes": status.bytes_relayed,
        "payload_bytes": status.payload_bytes,
        "payload_fp32_bytes": status.payload_bytes_fp32,
        "moment_bytes": status.moment_bytes,
        "residual_share": status.residual_share,
        "outer_momentum": status.outer_momentum,
        "host_memory_bytes": status.host_bytes,
        "device_memory_peak_bytes": status.device_bytes_peak,
        "mirror_bytes": status.mirror_bytes,
        "frames_refused": status.frames_refused,
        "events_lost": status.events_lost,
        "log_lines_lost": status.log_lines_lost,
    }
    yield from (Sample(name, value) for name, value in plain.items())
    for racks, count in sorted(status.rounds_by_racks.items()):
        yield Sample("rounds_by_racks", count, (str(racks),))
    for reason, count in sorted(status.rounds_missed.items()):
        yield Sample("rounds_missed", count, (reason,))
    yield from _data(status.data)
    yield from _verdicts(status.slow)


def _data(rows: DataRows | DataSeen | None) -> Iterator[Sample]:
    if rows is not None:
        for state, count in (("done", rows.done), ("open", rows.open), ("left", rows.left)):
            yield Sample("data_rows", count, (state,))
        yield Sample("data_rows_given_again", rows.given_again)


def _verdicts(slow: tuple[SlowRack, ...]) -> Iterator[Sample]:
    """The greatest ratio of each rack, comparison and cause."""
    worst: dict[tuple[str, ...], float] = {}
    for each in slow:
        key = (str(each.rack), each.against, each.cause)
        worst[key] = max(worst.get(key, 0.0), each.ratio)
    for labels, ratio in sorted(worst.items()):
        yield Sample("slow_ratio", ratio, labels)


def samples_of_job(view: JobStatus) -> Iterator[Sample]:
    """Samples of OF_JOB. For the witness, also those that racks take from `Status`."""
    plain = {
        "coordinates": view.coordinates,
        "ballot": view.ballot,
        "log_records": view.decided,
        "versions_decided": view.commits,
        "rounds_in_flight": view.in_flight,
        "racks_missing": len(view.missing),
        "racks_evicted": len(view.evicted),
        "racks_retired": len(view.retired),
        "racks_refused": len(view.refused),
    }
    yield Sample("state", 1, (view.state,))
    yield from (Sample(name, value) for name, value in plain.items())
    for rack in view.racks:
        yield from _of_rack(rack)
    if view.training is not None:
        yield from _of_training(view.training)
    else:
        yield Sample("racks_configured", view.configured)
        yield Sample("racks_live", sum(rack.live for rack in view.racks))
        yield from _data(view.data)
        yield from _verdicts(tuple(map(slow_rack, view.slow)))


def _of_rack(rack: RackSeen) -> Iterator[Sample]:
    """Samples of one rack, without the values that the process does not know."""
    known = {
        "rack_live": rack.live,
        "rack_step": rack.step if rack.step >= 0 else None,
        "rack_step_seconds": rack.step_ns / 1e9 if rack.step_ns else None,
        "rack_behind_versions": rack.behind if rack.behind >= 0 else None,
        "rack_silent_seconds": rack.silent_ms / 1e3 if rack.silent_ms >= 0 else None,
    }
    for name, value in known.items():
        if value is not None:
            yield Sample(name, value, (str(rack.rack),))


def _of_training(training: TrainingSeen) -> Iterator[Sample]:
    step_s, window_s = training.recent_step_ns / 1e9, training.recent_ns / 1e9
    rates = {
        "steps_per_second": (training.recent_steps, step_s),
        "tokens_per_second": (training.recent_tokens, step_s),
        "sent_bytes_per_second": (training.recent_sent, window_s),
        "received_bytes_per_second": (training.recent_received, window_s),
    }
    yield Sample("step_age_seconds", training.step_age_ms / 1e3)
    for name, (count, seconds) in rates.items():
        yield Sample(name, count / seconds if seconds else 0.0)
    for name, value in dict(training.recorded).items():
        yield Sample("recorded", value, (name,))


def flat(samples: Iterator[Sample]) -> dict[str, float]:
    """`{"mend/step": 12.0, "mend/rounds_by_racks/2": 3.0, ...}`."""
    return {"/".join((PREFIX, each.name, *each.labels)): float(each.value) for each in samples}
