"""Samples follow from the status alone, and have names, kinds and labels of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric as Family

from mend.errors import ConfigError
from mend.status import metrics_server
from mend.status.messages import DataSeen
from mend.status.metrics import (
    METRICS,
    OF_JOB,
    OF_RANK,
    Sample,
    flat,
    samples_of_job,
    samples_of_rank,
)
from mend.status.status import DataRows, SlowRack, Status, TokenLedger
from tests.unit.status.seen import rack_seen, training_seen, view

ROOT = Path(__file__).parents[3]


def status() -> Status:
    slow = SlowRack(rack=1, rank=0, against="peers", since_step=8, ratio=2.5, probability=1.0)
    return Status(
        rack=0, rank=0, step=12, tokens=100, versions=(1, 2), rounds_committed=3,
        rounds_missed={"late": 1}, ledger=TokenLedger(60.0, 40.0, 0.0), tokens_merged_share=0.6,
        racks_configured=2, racks_live=(0, 1), racks_merged=(0,), closed_by="all",
        stall_ms_total=1500.0, stall_ms_last=1.0, host_bytes=7, device_bytes_peak=0,
        bytes_sent=10, bytes_received=20, anchor_digest="", waiting=("x",), async_tp="off",
        frames_refused=0, events_lost=0, rounds_by_racks={2: 2, 1: 1}, slow=(slow, slow),
        data=DataRows(8, 4, 12, 2, (7, 1)),
    )  # fmt: skip


def test_metrics_of_rank_have_the_values_of_status() -> None:
    found = flat(samples_of_rank(status()))
    assert found["mend/step"] == 12
    assert (found["mend/tokens_merged"], found["mend/tokens_open"]) == (60, 40)
    assert (found["mend/racks_live"], found["mend/racks_merged"]) == (2, 1)
    assert (found["mend/rounds_by_racks/1"], found["mend/rounds_by_racks/2"]) == (1, 2)
    assert found["mend/rounds_missed/late"] == 1
    assert found["mend/stall_seconds"] == 1.5
    assert found["mend/slow_ratio/1/peers/"] == 2.5
    rows = [found[f"mend/data_rows/{state}"] for state in ("done", "open", "left")]
    assert [*rows, found["mend/data_rows_given_again"]] == [8, 4, 12, 2]


def test_epoch_is_the_first_whose_rows_are_not_all_done() -> None:
    rows = DataRows(14, 0, 4, 0, (6, 5, 3))
    assert (rows.rows, rows.epoch, rows.of_epoch) == (18, 1, "epoch 1 of 3: 5 of 6 rows done")
    assert DataRows(12, 0, 0, 0, (6, 6)).epoch == 1


def test_witness_has_the_rows_of_its_log() -> None:
    found = flat(samples_of_job(view(training=None, data=DataSeen(8, 4, 12, 2))))
    assert found["mend/data_rows/left"] == 12
    assert not any("data_rows" in name for name in flat(samples_of_job(view(training=None))))


def test_metrics_of_job_leave_out_what_is_not_known() -> None:
    racks = rack_seen(0, step=5), rack_seen(1, step=-1, silent_ms=-1, behind=-1, step_ns=0)
    found = flat(samples_of_job(view(racks=racks, state="starting", training=None)))
    assert found["mend/state/starting"] == 1
    assert found["mend/rack_step/0"] == 5
    assert [name for name in found if name.endswith("/1")] == ["mend/rack_live/1"]
    assert found["mend/racks_configured"] == view().configured


def test_rates_of_no_time_are_zero() -> None:
    found = flat(samples_of_job(view(training=training_seen(recent_ns=0, recent_step_ns=0))))
    assert found["mend/tokens_per_second"] == found["mend/sent_bytes_per_second"] == 0


@pytest.mark.parametrize("samples", [samples_of_rank(status()), samples_of_job(view())], ids=str)
def test_samples_are_distinct_and_of_the_table(samples: Iterator[Sample]) -> None:
    seen = list(samples)
    assert all(len(each.labels) == len(METRICS[each.name].labels) for each in seen)
    assert len({(each.name, each.labels) for each in seen}) == len(seen)


def test_leader_gives_no_sample_twice() -> None:
    """Its status and its view are served together."""
    twice = {each.name for each in samples_of_rank(status())} & {
        each.name for each in samples_of_job(view(training=training_seen()))
    }
    assert not twice


def spelled() -> set[str]:
    """Names as Prometheus has them."""
    return {
        f"mend_{name}{'_total' if metric.kind == 'counter' else ''}"
        for name, metric in METRICS.items()
    }


def test_page_and_board_name_the_metrics_of_the_table() -> None:
    page = (ROOT / "docs/internals/metrics.md").read_text()
    rows = set(re.findall(r"^\| `(mend_\w+)(?:\{[\w,]+\})?` \|", page, re.MULTILINE))
    assert rows == spelled()
    board = json.loads((ROOT / "examples/grafana/mend.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    named = {name for query in queries for name in re.findall(r"\bmend_\w+", query)}
    assert named <= spelled()
    assert len(named) >= 10


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="pip install prometheus-client"):
        metrics_server.MetricsServer("", 9464, {}, lambda: iter(()))


def test_host_of_another_machine_is_refused(free_port: int) -> None:
    with pytest.raises(ConfigError, match=r"metrics_host='192\.0\.2\.1': is not an address"):
        metrics_server.MetricsServer("192.0.2.1", free_port, {}, lambda: iter(()))


def test_family_has_the_labels_of_the_process_and_its_own(free_port: int) -> None:
    samples = [Sample("step", 3), Sample("rack_live", 1, ("1",)), Sample("rack_live", 0, ("2",))]
    labels = {"job_id": "a", "rack": "0"}
    server = metrics_server.MetricsServer("", free_port, labels, lambda: iter(samples))
    server.close()
    families = [each for each in server.collect() if isinstance(each, Family)]
    assert [(s.name, s.labels, s.value) for each in families for s in each.samples] == [
        ("mend_step", {"job_id": "a", "rack": "0"}, 3),
        ("mend_rack_live", {"job_id": "a", "rack": "1"}, 1),
        ("mend_rack_live", {"job_id": "a", "rack": "2"}, 0),
    ]
    assert set(OF_RANK).isdisjoint(OF_JOB)
