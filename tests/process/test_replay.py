"""A job's training once more, from its tapes: the same digests, or the first that is not the same.

The command is run where its words matter; else the racks are started by the nursery, as the command
starts them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mend.consensus.records import Commit
from mend.coordination.events import Effect, Merged, RecordCommitted
from mend.fragment import build_plan
from mend.trace import format as form
from mend.trace.format import Entry
from mend.trace.reader import read_tape
from mend.types import Peer
from mend_lab.commands.replay import CHILD, describe_first, read_script
from mend_lab.replay.comparison import Finding, file_name, findings_in
from mend_lab.replay.script import APPLIED, CAPTURED, ReplayScript, encode_script, recite
from mend_lab.replay.settings import REPLAY, seat_environment
from tests.process import train
from tests.process.conftest import Jobs
from tests.process.racks import Job, Nursery, run_module, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "grace_window_ms": 5.0,
    "stall_max_s": 0.02, "simulated_merge_delay_ms": 20, "outer_optimizer_momentum": 0.5,
    "outer_lr": 0.5,
}  # fmt: skip
STEPS, FOREVER = 40, 1_000_000


@pytest.fixture
def recorded(jobs: Jobs) -> Job:
    """Rack 1 is slow and the network is too, so that who is in a merge, and when it is applied, is
    as it happened to be. For a while it stands still, and rack 0 merges alone."""
    job = jobs(name="recorded")
    gate = job.gate()
    one = {"pace_ms": 12, "at": {"12": [["gate", gate]]}}
    zero = {"pace_ms": 4, "at": {"36": [["touch", gate]]}}
    job.run(steps=STEPS, config=CONFIG, per={0: zero, 1: one})
    return job


def command(python: str, *arguments: object) -> tuple[int, str]:
    """Status and all that `python -m mend_lab replay` printed."""
    return run_module(python, "mend_lab", "replay", *arguments, CUDA_VISIBLE_DEVICES="")


class Replay:
    """The racks of a script, started as the command starts them."""

    def __init__(self, jobs: Jobs, script: ReplayScript, ranks: int = 1) -> None:
        self.script, self.ranks = script, ranks
        self.job = jobs(len(script.parts), ranks=ranks, name="replayed")
        self.job.unjudged = "a replay keeps no tape"
        self.path = self.job.folder / "script"
        self.path.write_bytes(encode_script(script))

    def start(self, per: Sequence[dict[str, Any]] = (), **options: Any) -> None:
        """`per`: further options of each seat."""
        parts, addresses = self.script.parts, self.job.addresses[: self.job.racks]
        for seat, part in enumerate(parts):
            env = seat_environment(part.rack, part.config["racks"], seat, addresses)
            more = per[seat] if per else {}
            env[REPLAY] = str(self.path)
            self.job.start(seat, env=env, through=(CHILD, "-m"), **options, **more)

    def findings(self, kind: str) -> list[Finding]:
        peers = [Peer(rack, rank) for rack in range(self.job.racks) for rank in range(self.ranks)]
        found = [findings_in(self.job.folder / file_name(peer)) for peer in peers]
        return [finding for each in found for finding in each if finding.kind == kind]

    def equal(self, **options: Any) -> None:
        """Every rank finds every round equal."""
        self.start(**options)
        self.job.finish()
        assert self.findings("differs") == []
        rounds = len(self.script.commits)
        ranks = self.job.racks * self.ranks
        assert [each.number for each in self.findings("done")] == [rounds] * ranks
        assert len(self.findings("round")) == rounds * ranks

    def first(self, **options: Any) -> str:
        """What is told of the first difference."""
        self.start(**options)
        until(lambda: self.findings("differs") != [], f"it differs\n{self.job.logs()}")
        for process in self.job.processes.values():
            process.kill()
        first = min(self.findings("differs"), key=lambda finding: finding.place)
        return "\n".join(describe_first(first, self.script))


def rewrite(path: Path, change: Callable[[Entry], Entry]) -> None:
    """The same tape, in order and whole, with other entries."""
    tape, packer = read_tape(path), form.Packer()
    records = [form.record_of(tape.header)]
    for entry in tape.entries():
        assert isinstance(entry, Entry)
        kept = change(entry)
        effects = [form.effect_of(answer) for answer in kept.answers]
        records.append(form.record_of_entry(kept.machine, kept.now_ns, kept.event, effects))
    chunks = [packer.chunk(records[:1]), packer.chunk(records[1:]), packer.end()]
    path.write_bytes(form.file_begin() + b"".join(chunks))


def with_other_bits(fragment: int, version: int, digest: str) -> Callable[[Entry], Entry]:
    """As if the first tensor of this version had come out otherwise. `digest`: of the decided
    merge; an earlier attempt, as on a loaded machine, may have had other members."""

    def told(effect: Effect) -> Effect:
        match effect:
            case RecordCommitted(Commit() as c) if (c.fragment, c.version) == (fragment, version):
                return RecordCommitted(structs.replace(c, digests=("ab" * 32,)))
        return effect

    def change(entry: Entry) -> Entry:
        event = entry.event
        key = (fragment, version, digest)
        if isinstance(event, Merged) and (event.fragment, event.version, event.digest) == key:
            sums = bytes(8) + event.tensors[8:]
            event = structs.replace(event, digest="ab" * 32, tensors=sums)
        answers = tuple(form.answer_of(told(effect)) for effect in entry.effects)
        return replace(entry, event=event, answers=answers)

    return change


def test_training_is_replayed_to_the_same_digests(
    recorded: Job, jobs: Jobs, nursery: Nursery, tmp_path: Path
) -> None:
    """At another pace, without the delay, and whatever else the script says of the settings."""
    script = read_script([recorded.events_folder])
    commits = recorded.result(0).commits
    assert script.omitted == ()
    assert [c["digests"] for c in commits] == [
        list(commit.digests) for _, commit in script.commits.values()
    ]
    named = {tuple(m["rack"] for m in commit["members"]) for commit in commits}
    assert len(named) > 1, "all merges have the same members: the test shows nothing"
    Replay(jobs, script).equal(steps=STEPS, config={"fragments": 3})

    before = sorted(path.name for path in recorded.events_folder.iterdir())
    options = json.dumps({"out": str(tmp_path / "again-{rank}.json"), "steps": STEPS})
    status, said = command(
        nursery.python, recorded.events_folder, "--", "-m", "tests.process.train", options
    )
    assert status == 0, said
    rounds = len(commits)
    assert f"replay: {rounds} of {rounds} rounds, 2 racks of 1 ranks" in said
    assert f"replayed {rounds} rounds of 2 racks: every digest equals that on the tape" in said
    assert sorted(path.name for path in recorded.events_folder.iterdir()) == before


def firsts(script: ReplayScript) -> list[str]:
    """The first capture of each rack; a slow one makes it when the round of a fast one opens."""
    acts = [next(act for act in part.acts[0] if act.kind == CAPTURED) for part in script.parts]
    return [f"rack {k} rank 0, step {a.step}, fragment {a.fragment}" for k, a in enumerate(acts)]


def test_the_first_difference_is_told(recorded: Job, jobs: Jobs) -> None:
    """Other training by what was captured, a script that ends early by its next act, another merge
    by round, fragment and tensor."""
    recorded.unjudged = "its tapes are rewritten"
    folder, commits = recorded.events_folder, recorded.result(0).commits
    script = read_script([folder])
    told = Replay(jobs, script).first(steps=STEPS, learning_rate=0.051)
    assert any(f"different: {capture}: what was captured" in told for capture in firsts(script))
    assert "training itself diverged, before any merge of it" in told
    assert "may mean  other data" in told

    told = Replay(jobs, script).first(steps=STEPS - 10)
    assert f"after step {STEPS - 10}: it leaves the job; next on its tape is: " in told

    fragment, version = commits[3]["fragment"], commits[3]["version"]
    for rack in (0, 1):
        other = with_other_bits(fragment, version, commits[3]["digests"][0])
        rewrite(folder / f"tape-rack{rack}-rank0.mend", other)
    told = Replay(jobs, read_script([folder])).first(steps=STEPS)
    assert f"different: round 4 (fragment {fragment}, version {version}), rack " in told
    assert "the result has digest abababababababab on the tape" in told
    tensors = build_plan(train.build("plain", 0), 2)[fragment].slots
    assert f" now; tensor {tensors[0].name} of {len(tensors)}" in told


def test_racks_that_merge_a_slice_each_are_replayed(jobs: Jobs) -> None:
    """Nobody has a whole payload of another rack in the job; four racks slice by themselves."""
    job = jobs(racks=4, name="recorded")
    per = {rack: {"pace_ms": 4 + 4 * rack} for rack in range(4)}
    results = job.run(steps=24, config=CONFIG, per=per)
    reasons = [commit["reason"] for commit in results[0].commits]
    assert any("sharded" in reason for reason in reasons), reasons
    script = read_script([job.events_folder])
    Replay(jobs, script).equal(steps=24)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_racks_of_several_ranks_are_replayed(jobs: Jobs, parallel: str) -> None:
    job = jobs(ranks=2, name="recorded")
    payload = "bf16" if parallel == "ddp" else "powersgd-1"
    config = {**CONFIG, "codec": payload, "merge": "rda"}
    per = {1: {"pace_ms": 12}, 0: {"pace_ms": 4}}
    job.run(steps=24, config=config, parallel=parallel, per=per)
    script = read_script([job.events_folder])
    Replay(jobs, script, ranks=2).equal(steps=24, parallel=parallel)


def test_a_killed_rack_is_replayed_as_far_as_its_tape_goes(jobs: Jobs) -> None:
    """The other went on alone; its rounds are replayed too, and the dead rack's bytes held."""
    job = jobs(name="recorded")
    job.start_witness(heartbeat_ms=4000)
    gate, path = job.gate(), job.events_folder / "tape-rack1-rank0.mend"
    # Rack 1 trains until it is killed, and until then rack 0 does not end. It is held for alive for
    # 80 s more, so that rack 0 cannot merge alone what it trains from there on.
    config = {**CONFIG, "shutdown_timeout_s": 0.5, "sideband_heartbeat_ms": 4000}
    job.start(0, steps=STEPS, config=config, pace_ms=4, at={"24": [["gate", gate]]})
    job.start(1, steps=FOREVER, config=config, pace_ms=12)

    def applied() -> bool:
        if not path.exists() or not path.stat().st_size:
            return False
        tape = read_tape(path)
        return any(act.kind == APPLIED for act in recite(tape.header, False, tape.entries()).acts)

    until(applied, f"rack 1 has it on its tape that it applied something\n{job.logs()}")
    job.kill(1)
    Path(gate).touch()
    job.ended(0, code=1)
    assert job.result(0).error[0] == "NotMerged", "what it trained alone is in its weights only"
    script = read_script([job.events_folder])
    assert any(sentence.startswith("rack 1 is replayed up to step") for sentence in script.omitted)
    Replay(jobs, script).equal(per=[{"steps": STEPS}, {"steps": FOREVER}])


TWIN: dict[str, Any] = CONFIG | {"simulated_merge_delay_ms": 0}


class Returned:
    """Rack 1 is killed while it trains, and started again as a twin of rack 0: AdamW, with its
    scheduler and a scaler registered."""

    def __init__(self, jobs: Jobs, ranks: int = 1, **options: Any) -> None:
        self.job = job = jobs(ranks=ranks, witness=True, name="recorded")
        self.options = {"script": "tests.process.twin", "config": TWIN, **options}
        lives = {"rack0": 0, "rack1": 1, "again": 1}
        stops = {name: job.gate(f"stop-{name}") for name in lives}
        job.start(0, stop=stops["rack0"], pace_ms=5, **self.options)
        job.start(1, stop=stops["rack1"], pace_ms=8, **self.options)
        job.event(1, "applied", fragment=1, version=2)
        if self.options["config"].get("mirror_rack_state"):
            kept = partial(job.events, 0, kind="mirror-kept")
            until(lambda: all(map(kept, range(ranks))), "every rank of rack 0 keeps a mirror")
        job.processes[1].kill()
        returned = job.start(
            1, name="again", stop=stops["again"], learning_rate=0.5, **self.options
        )
        job.event(1, "state-copied")
        until(self._has_merged, f"what the new life has trained is merged\n{job.logs()}")
        for name in ("rack0", "again"):
            Path(stops[name]).touch()
        job.ended(0, code=0)
        assert returned.wait() == 0, job.logs()
        self.told = {"rack0": job.told(0), "again": job.told(1, name="again")}

    def _has_merged(self) -> bool:
        kinds = [(event["kind"], event.get("fate")) for event in self.job.events(1)]
        return ("applied", "named") in kinds[kinds.index(("state-copied", None)) :]

    def per(self, replay: Replay) -> list[dict[str, Any]]:
        """What every seat of the replay is started with: each ends behind the step at which it
        ended then."""
        found = []
        for name, rate in (("rack0", 0.01), ("rack1", 0.01), ("again", 0.5)):
            stop, end = replay.job.gate(f"stop-{name}"), self.told.get(name, {"states": {"0": ""}})
            at = {str(max(map(int, end["states"]))): [["touch", stop]]}
            found.append({"stop": stop, "at": at, "learning_rate": rate})
        return found


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, "ddp"), pytest.param(2, "fsdp2", marks=pytest.mark.slow)]
)
def test_lives_that_joined_are_replayed(jobs: Jobs, ranks: int, parallel: str) -> None:
    """Each goes on from what its donor has in the replay, and at its own place in the data, of its
    former life; all rounds come out alike."""
    config = TWIN | {"mirror_rack_state": True}
    returned = Returned(jobs, ranks, parallel=parallel, config=config)
    script = read_script([returned.job.events_folder])
    assert [part.title for part in script.parts] == ["rack 0", "rack 1", "rack 1 (life 2)"]
    assert len(script.commits) == script.rounds, script.omitted
    assert script.omitted == (f"rack 1 is replayed up to step {script.parts[1].acts[0][-1].step}",)
    named = [share.member.rack for _, commit in script.commits.values() for share in commit.members]
    assert {0, 1, 2} == set(named), "offers of every life were merged"
    replay = Replay(jobs, script, ranks=ranks)
    replay.equal(per=returned.per(replay), **returned.options)
    for name, seat in (("rack0", 0), ("again", 2)):
        for rank in range(ranks):
            was = returned.job.told(seat // 2, rank, name=name)
            now = replay.job.told(seat, rank)
            assert (now["begun"], now["states"]) == (was["begun"], was["states"])
            assert now["place"] == was["place"]
            assert (was["begun"][3] > 0) == (name == "again"), "its place is of a former life"
    if ranks == 1:
        replay = Replay(jobs, script)
        options = returned.options | {"growth_interval": 1000}
        told = replay.first(per=returned.per(replay), **options)
        step = script.given[0].step
        assert f"different: rack 0 rank 0, after step {step}: what it trains with besides" in told
        assert "another life began with it" in told


def test_tapes_that_are_not_there_are_told(tmp_path: Path) -> None:
    status, said = command(sys.executable, tmp_path, "--", "train.py")
    assert status == 2
    assert "no tape in there" in said
