"""Metrics of a live job over HTTP: the numbers of status(), whatever the other threads do."""

from __future__ import annotations

import json
import math
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import mend
from mend.errors import AddressInUse
from mend.status.metrics import METRICS, OF_RANK
from tests.process import train
from tests.process.conftest import Configure, Jobs
from tests.process.racks import LIMIT_S, until

CONFIG = {"sync_period_steps": 8, "overlap_steps": 2, "fragments": 1, "lockstep": True}
MOVING = {
    "mend/sent_bytes", "mend/received_bytes", "mend/stall_seconds", "mend/host_memory_bytes",
    "mend/waiting_reasons",
}  # fmt: skip
"""Change while the training thread stands."""

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Series:
    """(name, labels) -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    found = [each for family in text_string_to_metric_families(text) for each in family.samples]
    assert all(each.name.removeprefix("mend_").removesuffix("_total") in METRICS for each in found)
    return {(each.name, frozenset(each.labels.items())): each.value for each in found}


def as_flat(series: Series, rack: str) -> Iterator[tuple[str, float]]:
    """The metrics of one rank as `runtime.metrics` names them."""
    for (spelled, labels), value in series.items():
        name = spelled.removeprefix("mend_").removesuffix("_total")
        if name in OF_RANK and not spelled.endswith("_created"):
            known = dict(labels)
            assert "rack" in OF_RANK[name].labels or known["rack"] == rack
            own = (known[label] for label in OF_RANK[name].labels)
            yield "/".join((f"mend/{name}", *own)), value


def value_of(series: Series, name: str, **labels: str) -> float:
    """Infinite: it is not there, or not there yet."""
    found = [
        value for (each, has), value in series.items() if each == name and labels.items() <= has
    ]
    assert len(found) < 2
    return found[0] if found else math.inf


def test_scrapes_of_two_racks_and_the_witness_equal_status(
    jobs: Jobs, free_ports: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the loop's thread of both racks stands, and so do their training threads."""
    ports = free_ports(3)
    job = jobs()
    job._settings["MEND_METRICS_PORT"] = str(ports[2])
    job.start_witness()
    for rack in range(2):
        written = str(job.folder / f"metrics{rack}")
        acts = [["gate", job.gate("ask")], ["metrics", written], ["hold_loop", job.gate("loop")],
                ["touch", job.gate(f"there{rack}")], ["gate", job.gate()]]  # fmt: skip
        job.start(
            rack, steps=16, at={"13": acts}, config=CONFIG,
            env={"MEND_METRICS_PORT": str(ports[rack])},
        )  # fmt: skip

    job.event(0, "applied", version=1)
    job.event(1, "applied", version=1)
    until(
        lambda: value_of(scrape(ports[2]), "mend_versions_decided", rack="witness") == 1,
        "the witness has published the version",
    )
    witness = scrape(ports[2])
    assert value_of(witness, "mend_racks_configured", job_id=job.name) == 2
    assert value_of(witness, "mend_racks_live") == 2
    assert value_of(witness, "mend_state", state="running") == 1
    assert value_of(witness, "mend_coordinates") == 1
    assert value_of(witness, "mend_rack_live", rack="1") == 1
    for rack, port in enumerate(ports[:2]):  # its newest view: none follows while the loop stands
        other = str(1 - rack)
        until(
            lambda p=port, r=other: value_of(scrape(p), "mend_rack_live", rack=r) == 1,
            "the rack has published its view",
        )
    Path(job.gate("ask")).touch()
    for rack in range(2):
        until(Path(job.gate(f"there{rack}")).exists, "the rack has written its metrics")
        written = json.loads((job.folder / f"metrics{rack}").read_text())
        assert written["mend/step"] == 12
        assert written["mend/rounds_committed"] == 1
        assert written["mend/rounds_by_racks/2"] == 1
        series = scrape(ports[rack])
        scraped = dict(as_flat(series, str(rack)))
        assert scraped.keys() == written.keys()
        for name in written.keys() - MOVING:
            assert scraped[name] == written[name], name
        assert scraped["mend/sent_bytes"] >= written["mend/sent_bytes"] > 0
        assert value_of(series, "mend_rack_live", rack=str(1 - rack)) == 1
    Path(job.gate("loop")).touch()
    Path(job.gate()).touch()
    for rack in range(2):
        job.ended(rack, code=0)
        assert not job.result(rack).kinds("observer-unanswered")


@pytest.mark.parametrize("exchange", [True, False])
def test_port_of_metrics_is_free_after_the_end(
    alone: Configure, free_port: int, exchange: bool
) -> None:
    config = alone(metrics_port=free_port, exchange=exchange)
    for _ in range(2):
        model = train.build("plain", 0)
        runtime = mend.mend_init(model, config, train.optimizer_of(model))
        scraped = dict(as_flat(scrape(free_port), "0"))
        assert scraped["mend/step"] == 0
        assert scraped.keys() == runtime.metrics().keys()
        mend.mend_shutdown(model)
    with pytest.raises(OSError, match="refused"):
        scrape(free_port)


def test_taken_port_of_metrics_is_refused_with_its_holder(alone: Configure, free_port: int) -> None:
    model = train.build("plain", 0)
    refused = pytest.raises(AddressInUse, match=r"Set another metrics_port.*Held by process")
    with socket.create_server(("127.0.0.1", free_port)), refused:
        mend.mend_init(model, alone(metrics_port=free_port))
    mend.mend_init(model, alone(metrics_port=free_port))  # nothing of the first attempt is left
    mend.mend_shutdown(model)
