"""170 whole jobs with faults, and what a seed promises: the same run, every time.

Every run looks at I1..I6 while it goes (mend_lab.sim.checkers). A failing seed prints its story;
look closer with `python -m mend_lab simulate --seed N --trace`. The first 40 seeds are run in
test_tapes; `make test` leaves out the long ones (tests/sim/extent.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch

from mend.codec import CODECS
from mend.consensus.log import RECORDS_KEPT
from mend.coordination.messages import Message
from mend.errors import Diverged, PayloadGone, StartTimeout
from mend.types import MS, SECOND, Address, Peer
from mend_lab.sim import Fault, Scenario, SimulationReport, World, draw
from mend_lab.sim.faults import KINDS
from mend_lab.sim.scenario import SHUTDOWN_NS, calm
from mend_lab.sim.scripted_faults import PULLED
from mend_lab.sim.story import setup
from tests.noted import pairs
from tests.sim.extent import blocks
from tests.sim.test_tapes import TAPED

SEEDS, BLOCK = 170, 8
"""They show 29 of the 36 bugs of benchmarks/results/mutation_table.md; others need over 280."""
QUICK = 80
"""Those below are run by `make test`, with the first 40 of test_tapes."""
RADIAL_SEEDS = 20
"""Of them, done again with racks of two ranks that merge by rda, of which few are drawn; half of
them by `make test`."""


def told(report: SimulationReport) -> str:
    return "\n".join([setup(report.scenario), *(f"    {each}" for each in report.problems)])


@pytest.mark.parametrize("seeds", blocks(range(TAPED, SEEDS), BLOCK, QUICK))
def test_no_invariant_breaks(seeds: list[int]) -> None:
    reports = [World(seed).run() for seed in seeds]
    broken = [told(report) for report in reports if report.problems]
    assert not broken, "\n" + "\n".join(broken)
    assert sum(report.commits for report in reports) > len(reports), "hardly anything was committed"


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_is_one_run(seed: int) -> None:
    first, second = World(seed).run(), World(seed).run()
    assert first.trace == second.trace
    assert (first.events, first.virtual_ns) == (second.events, second.virtual_ns)


def test_the_seeds_cover_what_they_are_for() -> None:
    drawn = [draw(seed) for seed in range(SEEDS)]
    kinds = Counter(fault.kind for scenario in drawn for fault in scenario.faults)
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) > SEEDS // 100, kinds
    behind = {fault.after for scenario in drawn for fault in scenario.faults}
    assert behind == {"", "Hello", "Report", "Orders", "Prepare", "Vote", PULLED}
    assert behind - {"", PULLED} <= {kind.__name__ for kind in get_args(Message)}
    assert any(f.kind == "crash" and f.b >= 0 for s in drawn for f in s.faults), "one rank alone"
    assert sum(bool(s.quiet_ns) and s.shutdown_ns > SHUTDOWN_NS for s in drawn) > SEEDS // 4
    assert any(not scenario.faults for scenario in drawn)
    assert {scenario.racks for scenario in drawn} == {2, 3, 4}
    assert {scenario.ranks for scenario in drawn} == {1, 2}
    assert {scenario.apply_mode for scenario in drawn} == {"carry", "overwrite", "blend"}
    assert {scenario.payload for scenario in drawn} == {*CODECS, "powersgd-1"}
    assert {(s.merge, s.ranks) for s in drawn} == {(m, r) for m in ("mean", "rda") for r in (1, 2)}
    assert any(scenario.lockstep for scenario in drawn)
    assert any(scenario.loss for scenario in drawn)
    assert any(scenario.non_finite for scenario in drawn)
    assert any(scenario.overlap_steps == 0 for scenario in drawn)
    assert any(scenario.pauses for scenario in drawn)
    assert {scenario.first for scenario in drawn} == {0, 1, 7}
    cut = [scenario for scenario in drawn if scenario.cut_step]
    assert {s.records_kept for s in cut} == {3, RECORDS_KEPT}, "and in the midst of one a snapshot"


def run(scenario: Scenario) -> tuple[World, SimulationReport]:
    world = World(scenario)
    report = world.run()
    assert not report.problems, told(report)
    return world, report


def kinds(world: World, rack: int) -> list[str]:
    return [kind for kind, _ in notes(world, rack)]


def test_a_calm_job_merges_everything_and_ends_together() -> None:
    world, report = run(calm())
    assert report.commits == 9  # 2 fragments x 4 cycles; fragment 0 has 3 more steps at the end
    for training in world.trainings.values():
        assert training.failure is None
        assert training.trainer.open_tokens() == 0
        assert training.trainer.ledger.missed == {}
    assert not any("left-alone" in kinds(world, rack) for rack in (0, 1))


@pytest.mark.parametrize("pause_s", [2, 6])
def test_a_rack_that_does_something_else_for_long_keeps_its_seat_and_its_vote(pause_s: int) -> None:
    """An evaluation is no silence: its loop answers. What it trains behind it is merged."""
    pauses = ((1, 10, pause_s * SECOND),)
    world, report = run(calm(pauses=pauses, shutdown_ns=30 * SECOND))
    assert not {"roster", "rack-silent"} & set(kinds(world, 0))
    assert report.virtual_ns > pause_s * SECOND
    assert all(training.trainer.open_tokens() == 0 for training in world.trainings.values())


def test_lockstep_does_not_depend_on_delays_or_speeds() -> None:
    """Blocking or not, fast or slow, lossy or not: the same commits with the same digests."""

    def commits(**changes: object) -> list[object]:
        world, _ = run(calm(lockstep=True, **changes))
        return sorted(
            (fields.fragment, fields.version, str(fields.members), str(fields.digests))
            for fields in world.checkers.commits.values()
        )

    plain = commits()
    assert plain == commits(overlapped=False)
    assert plain == commits(delay_ns=60 * MS, jitter_ns=200 * MS, loss=0.2, duplicate=0.1)
    assert plain == commits(step_ns=(20 * MS, 90 * MS), byte_ns=100_000)


def test_a_survivor_trains_on_and_merges_on() -> None:
    world, _ = run(calm(faults=(Fault("crash", 600 * MS, 1 << 62, 1),)))
    survivor = next(t for peer, t in world.trainings.items() if peer.rack == 0)
    assert survivor.trainer.step == 24
    assert "rack-silent" in kinds(world, 0)
    assert "kept-local" not in kinds(world, 0), "the dead rack has lost its vote"
    assert survivor.trainer.open_tokens() == 0


def test_without_a_coordinator_nobody_commits_and_nobody_stops() -> None:
    world, _ = run(calm(faults=(Fault("crash", 300 * MS, 1 << 62, 99),)))
    assert all(training.trainer.step == 24 for training in world.trainings.values())
    assert "coordinator-silent" in kinds(world, 0)
    assert "coordinator-silent" in kinds(world, 1)


def test_a_rack_that_slept_through_the_end_is_told_and_ends() -> None:
    """Found by seed 191: it polled for ever without time passing."""
    world, _ = run(calm(faults=(Fault("freeze", 900 * MS, 30 * SECOND, 1),)))
    sleeper = next(t for peer, t in world.trainings.items() if peer.rack == 1)
    assert sleeper.trainer.step == 24
    assert sleeper.failure is None


def test_stale_offers_end_though_k_is_never_reached() -> None:
    """Found by seeds 20 and 182: with nothing fresh to commit they stayed open for ever."""
    world, report = run(
        calm(
            racks=3, steps=(22, 26, 24), step_ns=(60 * MS, 20 * MS, 90 * MS),
            staleness_max_rounds=0, k=1,
        )
    )  # fmt: skip
    ended = [t.trainer.ledger.missed for t in world.trainings.values()]
    assert any("offer dropped: too old" in m or "declined or too old" in m for m in ended), ended
    assert report.finished


def test_a_step_that_gave_nan_is_refused_at_its_own_rack_and_ends_it() -> None:
    """It declined for ever, and ended in order."""
    world, _ = run(calm(non_finite=((1, 5),)))
    assert "declined" in kinds(world, 1)
    assert "declined" not in kinds(world, 0)
    ill = world.trainings[Peer(1, 0)]
    assert isinstance(ill.failure, Diverged)
    assert "fragment 1, step 7: 1 holds nan" in str(ill.failure)
    healthy = next(t for peer, t in world.trainings.items() if peer.rack == 0)
    assert healthy.trainer.open_tokens() == 0


@pytest.mark.parametrize("witness", [True, False])
def test_a_rack_that_never_comes_stops_the_start_and_is_named(witness: bool) -> None:
    world = World(calm(witness=witness, faults=(Fault("crash", 0, 1 << 62, 1),)))
    waiting, absent = (world.trainings[Peer(rack, 0)] for rack in (0, 1))
    absent.process.crash()  # before its first word
    report = world.run()
    assert not report.problems, told(report)
    assert isinstance(waiting.failure, StartTimeout)
    assert "no hello from rack 1" in str(waiting.failure)
    assert waiting.trainer.step == 0, "nobody trains towards a job that cannot begin"
    assert report.commits == 0


def test_a_job_does_not_begin_without_the_vote_of_a_rack_that_dies_right_after_its_hello() -> None:
    """It began without it once; but a rack that was only cut off could have begun another one."""
    world, _ = run(calm(faults=(Fault("crash", 0, 1 << 62, 1),)))
    survivor = world.trainings[Peer(0, 0)]
    assert isinstance(survivor.failure, StartTimeout)
    assert "has to vote for the first record of the log, and rack 1 is silent" in str(
        survivor.failure
    )
    assert survivor.trainer.step == 0


def test_without_a_witness_rack_0_is_the_one_that_may_not_die() -> None:
    world, _ = run(calm(witness=False, faults=(Fault("crash", 600 * MS, 1 << 62, 0),)))
    survivor = next(t for peer, t in world.trainings.items() if peer.rack == 1)
    assert survivor.trainer.step == 24
    assert survivor.failure is None
    assert {"coordinator-silent", "left-alone", "kept-local"} <= set(kinds(world, 1))
    assert survivor.trainer.open_tokens() > 0


def test_without_a_witness_rack_0_goes_on_alone() -> None:
    world, report = run(calm(witness=False, faults=(Fault("crash", 600 * MS, 1 << 62, 1),)))
    survivor = next(t for peer, t in world.trainings.items() if peer.rack == 0)
    assert survivor.trainer.open_tokens() == 0
    assert "kept-local" not in kinds(world, 0)
    last = max(fields.version for fields in world.checkers.commits.values())
    assert [m.rack for m in world.checkers.commits[(0, last)].members] == [0]
    assert report.finished


def test_when_everything_is_too_old_k_does_not_keep_it_open() -> None:
    """All three must be in, and no offer may be one version old: the slow one always is late."""
    world, report = run(
        calm(
            racks=3, steps=(22, 26, 24), step_ns=(60 * MS, 20 * MS, 90 * MS),
            staleness_max_rounds=0, k=3,
        )
    )  # fmt: skip
    assert report.finished
    assert all(training.failure is None for training in world.trainings.values())
    assert not any(
        state.offer for t in world.trainings.values() for state in t.trainer.fragment_states
    )


def test_a_donor_is_not_trusted() -> None:
    """Rack 1 begins on rack 0's version 0, and takes it only with the digest of the log."""
    world = World(calm())
    donor = next(t.process for peer, t in world.trainings.items() if peer.rack == 0)
    good, serve = dict(donor.served), donor.serve
    assert good, "rack 0 serves its version 0"

    def spoil(key: bytes, view: memoryview) -> None:
        raw = bytes(view.cast("B"))
        good[key] = memoryview(raw)
        serve(key, memoryview(bytes([raw[0] ^ 1]) + raw[1:]))

    def heal() -> None:
        donor.serve = serve
        donor.served.update(good)

    donor.serve = spoil
    world.loop.at(300 * MS, heal)
    report = world.run()
    assert not report.problems, told(report)
    refused = [fields for kind, fields in notes(world, 1) if kind == "copy-failed"]
    assert refused
    assert "bits are not those of the log" in str(refused[0]["error"])


def notes(world: World, rack: int) -> list[tuple[str, dict[str, object]]]:
    return [
        note
        for peer, training in world.trainings.items()
        if peer.rack == rack
        for note in pairs(training.process.notes)
    ]


@pytest.mark.parametrize("victim", [1, 2])
def test_payloads_stay_bounded_while_a_dead_rack_is_not_noticed_yet(victim: int) -> None:
    run(
        calm(
            racks=3,
            steps=(48,) * 3,
            step_ns=(50 * MS,) * 3,
            faults=(Fault("crash", 600 * MS, 1 << 62, victim),),
        )
    )


# -------------------------------------------------------------- merges that need sums over a rack


def end_of(world: World, ranks: int) -> list[torch.Tensor]:
    """Per fragment, the anchor that rack 0 ends with: its ranks' parts laid end to end."""
    parts = [world.trainings[Peer(0, rank)].trainer.fragment_states for rank in range(ranks)]
    return [
        torch.cat([t.anchor.values for t in fragment_states])
        for fragment_states in zip(*parts, strict=True)
    ]


def test_the_sums_of_a_rack_do_not_depend_on_how_many_ranks_it_has() -> None:
    """3 and 9 elements over 4 ranks: some own nothing of a tensor."""
    fields = {"merge": "rda", "lockstep": True, "fragments": 3, "numel": 3}
    alone, _ = run(calm(**fields))
    mean, _ = run(calm(**{**fields, "merge": "mean"}))
    for theirs, plain in zip(end_of(alone, 1), end_of(mean, 1), strict=True):
        assert theirs.numel() == 5 or not torch.equal(theirs, plain), "the third is always plain"
    for ranks in (2, 4):
        world, _ = run(calm(**fields, ranks=ranks, loss=0.1, jitter_ns=60 * MS))
        assert len(world.checkers.commits) == len(alone.checkers.commits) > 6
        for ours, theirs in zip(end_of(world, ranks), end_of(alone, 1), strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_a_rank_whose_mate_had_to_copy_does_not_wait_for_its_sums() -> None:
    """Rank 1 of rack 1 gets no payload, so it measures nothing and copies what rack 0 decided."""
    world = World(calm(merge="rda", ranks=2, witness=False))
    cut_off, mate = (world.trainings[Peer(1, rank)].process for rank in (1, 0))
    fetch = cut_off.fetch

    def only_states(
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        done: Callable[[Exception | None], None],
        *more: Any,
        **named: Any,
    ) -> None:
        if key.startswith(b"o"):
            cut_off.later(MS, lambda: done(PayloadGone("the test holds it back")))
        else:
            fetch(holders, key, checksum, into, done, *more, **named)

    cut_off.fetch = only_states
    report = world.run()
    assert not report.problems, told(report)
    several = [c for c in world.checkers.commits.values() if len(c.members) > 1]
    copied = [fields["version"] for kind, fields in pairs(mate.notes) if kind == "copied"]
    assert len(copied) > len(several) > 0, "version 0 of two fragments, and all that needed sums"
    assert all(training.trainer.step == 24 for training in world.trainings.values())


@pytest.mark.parametrize(
    "seeds",
    blocks(range(RADIAL_SEEDS), BLOCK, RADIAL_SEEDS // 2),
)
def test_no_invariant_breaks_under_rda_with_two_ranks(seeds: list[int]) -> None:
    for seed in seeds:
        report = World(dataclasses.replace(draw(seed), merge="rda", ranks=2, sharded=False)).run()
        assert not report.problems, told(report)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("back", ["cut off", "restarted"])
def test_rack_behind_the_start_of_the_log_continues_from_a_snapshot(ranks: int, back: str) -> None:
    """With a log of three records; a rack that missed them, or joins, could never read it."""
    world = World(seed=3, racks=3, ranks=ranks, records_kept=3, steps=50, shutdown_ns=40 * SECOND)
    if back == "cut off":
        world.partition(1, at=0.4, until=1.9)
    else:
        world.restart(1, at=0.4, until=1.4)
    report = world.heal(at=2.0).run()
    assert not report.problems, told(report)
    assert "snapshot" in kinds(world, 1)
    for training in world.trainings.values():
        assert training.failure is None
        assert training.trainer.open_tokens() == 0
