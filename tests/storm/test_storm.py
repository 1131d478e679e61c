"""A few storms, and one that must not pass: the harness sees what it is there to see."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from mend.tools.keys_command import create
from mend.types import WITNESS
from tests.process.racks import Nursery
from tests.storm import network
from tests.storm.kinds import KINDS, LINK_KINDS, NOBODY, Kind
from tests.storm.storm import Fault, Storm, drawn_shape

pytestmark = pytest.mark.process


LINKS = not network.missing()


@pytest.mark.parametrize(
    "seed", [4, 8, 15, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 10, 13))]
)
def test_a_storm_breaks_no_promise(seed: int, tmp_path: Path, nursery: Nursery) -> None:
    """All six have most kinds of faults between them, two ranks per rack, and links where we may
    make some."""
    kinds = {name: kind for name, kind in KINDS.items() if LINKS or name not in LINK_KINDS}
    storm = Storm(seed, tmp_path / "storm", nursery, kinds, links=LINKS)
    assert storm.run() == [], storm.job.logs()
    assert storm.done, "a storm without a fault"


ONE_FAULT_SEED = 4
"""Draws three racks, and one fault."""


def test_a_rack_that_dies_of_itself_is_found(tmp_path: Path, nursery: Nursery) -> None:
    """Nobody killed it, as far as the judge knows; and a diary that was changed is not believed."""

    def secretly(storm: Storm, fault: object) -> None:
        storm.kill(1)
        storm.start(1)
        storm.joined(1)
        storm.dead.clear()
        path = storm.diary(1, 0, 0)
        first, *lines = path.read_text().splitlines()
        told = {**json.loads(first), "digest": "made up"}
        path.write_text("\n".join([json.dumps(told), *lines]) + "\n")

    kinds = {"secretly": Kind(lambda _: [1], secretly)}
    found = Storm(ONE_FAULT_SEED, tmp_path / "storm", nursery, kinds).run()
    assert any("rack 1 life 0 rank 0 exits -9" in sentence for sentence in found), found
    assert any("digest" in sentence for sentence in found), found


KEYED_SEED = 5
"""Draws two racks and a witness with a key, and one fault."""


def test_a_key_is_replaced_while_the_job_trains(tmp_path: Path, nursery: Nursery) -> None:
    """The three rounds of SECURITY.md, each process killed and started again in each of them: the
    others merge on, who comes back merges with them, and the judge finds the promised bits."""
    rotation = Kind(lambda _: [NOBODY], replace_key)
    storm = Storm(KEYED_SEED, tmp_path / "storm", nursery, {"new key": rotation})
    assert storm.run() == [], storm.job.logs()
    assert storm.shown == "2 racks + witness with a key"
    assert len(storm.done) == 1
    keys = [event["protection"] for event in storm.job.events(0) if event["kind"] == "protection"]
    assert keys == ["keys"] * 4, "a start, and three rounds"


def replace_key(storm: Storm, _: Fault) -> None:
    old, new = KEYED_SEED.to_bytes(32), b"the key that replaces the other "
    for count, keys in enumerate(((old, new), (new, old), (new,))):
        storm.job.key_file = storm.folder / f"key-{count}"
        create(storm.job.key_file, keys)
        for rack in range(storm.shape.racks):
            began_ns = time.time_ns()
            storm.kill(rack)
            storm.start(rack)
            go_on(storm, began_ns)
        began_ns = time.time_ns()
        storm.kill_witness()
        storm.start_witness()
        go_on(storm, began_ns)


def go_on(storm: Storm, began_ns: int) -> None:
    """Until all vote again, without which the next death would be one too many, and every rack has
    a merge that none had before."""

    def votes() -> list[int]:
        found = [e for rack in (0, 1, WITNESS) for e in storm.job.events(rack, kind="roster")]
        later = [event for event in found if event["time_ns"] > began_ns]
        return list(max(later, key=lambda e: e["time_ns"])["votes"]) if later else []

    storm.until(lambda: votes() == [0, 1, WITNESS], "all vote again")
    seen = max(storm.versions(rack) for rack in storm.shape.alive)
    for rack in storm.shape.alive:
        storm.until(
            lambda rack=rack: storm.versions(rack) > seen,
            f"rack {rack} has more than {seen} merges",
        )


def test_a_seed_draws_the_same_job() -> None:
    shapes = [str(drawn_shape(random.Random(f"storm {seed}"), True)) for seed in (1, 1)]
    assert shapes[0] == shapes[1]
    drawn = [drawn_shape(random.Random(seed), False) for seed in range(200)]
    assert not any(shape.linked for shape in drawn)
    assert {shape.racks for shape in drawn} == {2, 3, 4}
    assert {shape.parallel for shape in drawn if shape.ranks > 1} == {"ddp", "fsdp2"}
