"""What a run comes to, from its events; and events that are none do no harm."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mend.errors import EventError
from mend.events.lines import decode_line
from mend.tools.report import summary
from mend.tools.report.facts import FAULTS_SHOWN, NAMES_MAX, FactCollector, RunFacts
from mend.tools.report.rounds import Rounds
from tests.noted import filled

S = 1_000_000_000


def commit(fragment: int, version: int, racks: dict[int, int], bits: str = "aa") -> dict[str, Any]:
    """`racks`: rack -> its offer's number. Every one of them weighs 100 tokens."""
    members = [
        {"rack": rack, "seq": seq, "base": 0, "capture_step": 0, "tokens": 100, "steps": 1}
        for rack, seq in racks.items()
    ]
    return {
        "kind": "commit", "fragment": fragment, "version": version, "members": members,
        "digests": [bits], "reason": "all-in" if len(racks) > 1 else "grace-over, without rack 1",
        "closed_by": "all-in" if len(racks) > 1 else "grace-over",
    }  # fmt: skip


def progress(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "progress", "step": step, "tokens": 10 * step, "at_ns": step * S,
        "stall_ms_total": 2.0 * step, "bytes_sent": 5 * step, "bytes_received": 4 * step, **more,
    }  # fmt: skip


class Run:
    """Two ranks, rack 0 and rack 1."""

    def __init__(self) -> None:
        self.collector = FactCollector([(0, 0), (1, 0)])
        self.at_ns = self.refused = 0

    def says(self, rack: int, *events: dict[str, Any]) -> Run:
        for event in events:
            self.at_ns += S
            line = json.dumps({**filled(event), "time_ns": self.at_ns})
            try:
                self.collector.take(rack, 0, decode_line(line.encode()))
            except EventError:
                self.refused += 1
        return self

    def follows(self, event: dict[str, Any]) -> Run:
        """Somebody outside the job says it."""
        line = json.dumps({**filled(event), "time_ns": self.at_ns})
        self.collector.take_followed(decode_line(line.encode()))
        return self

    def both(self, event: dict[str, Any]) -> Run:
        return self.says(0, event).says(1, event)

    def ends(self) -> RunFacts:
        return self.collector.finish()


def test_compression_and_residual_of_a_codec_are_shown() -> None:
    run = Run()
    for residual in (0.3, 0.1, 0.2):
        run.says(0, {"kind": "encoded", "bytes": 100, "fp32_bytes": 800, "residual": residual})
    facts = run.says(0, {"kind": "encoded", "bytes": -1, "fp32_bytes": 8, "residual": 0}).ends()
    assert facts.offered == (300, 2400)
    assert run.refused == 1
    tiles = {name: (figure, more) for name, figure, more in summary.tiles(facts, {})}
    assert tiles["Compression"] == ("8 x", "2.1 kB less per receiver than fp32")
    assert tiles["Residual"][0] == "20.0%"
    assert "Compression" not in {name for name, *_ in summary.tiles(Run().ends(), {})}


def test_codec_that_sends_more_than_fp32_says_more() -> None:
    encoded = {"kind": "encoded", "bytes": 900, "fp32_bytes": 800, "residual": 0.0}
    (tile,) = [e for e in summary.tiles(Run().says(0, encoded).ends(), {}) if "fp32" in e.more]
    assert tile.more == "100 B more per receiver than fp32"


def test_settings_on_the_page_have_no_path_of_a_key() -> None:
    settings = {"key_file": "/home/me/run7.key", "fragments": 1}
    assert summary.changed_settings(Rounds(settings=settings)) == [("fragments", 1)]


def test_rounds_are_counted_once_with_who_was_in() -> None:
    facts = Run().both(commit(0, 1, {0: 1, 1: 1})).both(commit(1, 1, {0: 1})).ends()
    assert (facts.rounds, facts.fragments) == (2, {0, 1})
    assert facts.merged == {0: 2, 1: 1}
    assert facts.tokens_merged == {0: 200, 1: 100}
    assert facts.closings == {
        ("all-in", "all-in"): 1, ("grace-over", "grace-over, without rack 1"): 1,
    }  # fmt: skip
    assert facts.strip.shares(1) == [1.0, 0.0]
    assert (facts.agreed, facts.alone, facts.differences) == (2, 0, [])
    assert [each[:2] for each in facts.newest] == [(0, 1), (1, 1)]


def test_rounds_of_moments_are_rounds_without_tokens_of_their_own() -> None:
    encoded = {"kind": "encoded", "bytes": 40, "fp32_bytes": 40, "residual": 0.0, "moments": True}
    run = Run().both(commit(0, 1, {0: 1, 1: 1})).says(0, encoded)
    facts = run.both({**commit(1, 1, {0: 1, 1: 1}), "moments": True}).ends()
    assert (facts.rounds, facts.moment_rounds, facts.fragments) == (2, 1, {0})
    alone = Run().both(commit(0, 1, {0: 1, 1: 1})).ends()
    assert facts.tokens_merged == alone.tokens_merged
    assert (facts.moment_bytes, facts.offered) == (40, (0, 0))
    shown = {what: (figure, more) for what, figure, more in summary.tiles(facts, {})}
    assert shown["Moments, running statistics"] == (
        "1",
        "of these rounds; offers of 40 B per receiver",
    )


def test_other_digests_are_named() -> None:
    run = Run().says(0, commit(2, 7, {0: 1, 1: 1})).says(1, commit(2, 7, {0: 1, 1: 1}, "bb"))
    assert run.ends().differences == [
        "fragment 2 version 7: rack 1 rank 0 has other digests than rack 0 rank 0"
    ]


def test_other_digests_of_a_lower_rack_are_not_said_to_differ_from_its_own() -> None:
    """The report said "rack 0 has other digests than rack 0", and counted the round as equal."""
    run = Run().says(1, commit(2, 7, {0: 1, 1: 1})).says(0, commit(2, 7, {0: 1, 1: 1}, "bb"))
    facts = run.both(commit(2, 8, {0: 2, 1: 2})).ends()
    assert facts.differences == [
        "fragment 2 version 7: rack 0 rank 0 has other digests than rack 1 rank 0"
    ]
    assert (facts.rounds, facts.agreed, facts.alone) == (2, 1, 0)


def test_a_round_that_one_file_has_proves_nothing() -> None:
    facts = Run().says(0, commit(0, 1, {0: 1, 1: 1})).ends()
    assert (facts.agreed, facts.alone) == (0, 1)


def test_rounds_that_a_lineage_undoes_are_not_held_against_it() -> None:
    """Decided by racks that died, and decided anew without them: other bits are right there."""
    run = Run().says(1, commit(0, 5, {1: 1}))
    run.says(0, {"kind": "lineage", "without": [1], "versions": [4]}, commit(0, 5, {0: 1}, "bb"))
    facts = run.ends()
    assert facts.differences == []
    assert facts.fault_counts == {"lineage": 1}


def test_the_time_of_a_round_is_from_the_own_capture_to_the_decision() -> None:
    run = Run().says(0, {"kind": "captured", "fragment": 0, "seq": 3, "step": 9})
    run.says(1, {"kind": "captured", "fragment": 0, "seq": 4, "step": 9})
    run.both(commit(0, 1, {0: 3, 1: 4}))
    assert run.ends().waits.values == [2.0, 2.0]


def test_steps_to_an_apply_are_those_of_merged_offers_of_weights_but_the_last() -> None:
    run = Run()
    for seq, fate, closing in ((1, "named", False), (2, "dropped", False), (3, "named", True)):
        captured = {"kind": "captured", "fragment": 0, "seq": seq, "step": 9, "closing": closing}
        applied = {"kind": "applied", "fragment": 0, "seq": seq, "step": 13, "fate": fate}
        run.says(0, captured, commit(0, seq, {0: seq}), applied)
    moments = {"kind": "captured", "fragment": 1, "seq": 1, "step": 9}
    run.says(0, moments, {"kind": "applied", "fragment": 1, "seq": 1, "step": 29, "fate": "named"})
    assert run.ends().delays == (1, 4)


def test_a_rack_that_starts_again_goes_on_where_it_was() -> None:
    run = Run().says(0, progress(1), progress(40), progress(1), progress(6, last=True))
    facts = run.ends()
    (rank,) = facts.of_rack(0)
    assert (rank.lives, rank.closed) == (2, True)
    assert rank.track.newest is not None
    assert (rank.track.newest.step, rank.track.newest.tokens) == (46, 460)
    assert rank.track.newest.stall_ms == 92.0
    steps = [point.step for point in rank.track.points()]
    assert steps == [1, 40, 41, 46]


def test_recorded_values_become_curves_also_when_they_are_no_numbers() -> None:
    def recorded(step: int, **values: Any) -> dict[str, Any]:
        fields = {"step": step, "tokens": 10 * step, "at_ns": step * S, "values": values}
        return {"kind": "recorded", **fields}

    run = Run().says(0, recorded(1, loss=2.5), recorded(2, loss="nan"), recorded(3, loss="inf"))
    run.says(0, recorded(4, loss="much"))
    curve = run.ends().ranks[0, 0].curves["loss"]
    assert curve.tokens == [10, 20, 30]
    assert [str(value) for value in curve.values] == ["2.5", "nan", "inf"]
    for number in range(2 * NAMES_MAX):
        run.says(0, recorded(5, **{f"v{number}": 1.0}))
    assert len(run.ends().ranks[0, 0].curves) == NAMES_MAX


def test_another_job_in_the_same_folder_begins_anew() -> None:
    run = Run().says(0, {"kind": "start", "job": "first"}, progress(9))
    run.says(0, {"kind": "start", "job": "second"}, progress(1))
    run.says(1, {"kind": "start", "job": "second"})
    facts = run.ends()
    assert (facts.job, facts.earlier_jobs) == ("second", 1)
    assert facts.ranks[0, 0].lives == 1


def test_start_behind_a_job_without_name_begins_anew() -> None:
    """The `start` of the first job was deleted with the older half of its file."""
    run = Run().says(0, progress(9), commit(0, 1, {0: 1}))
    run.says(0, {"kind": "start", "job": "second"}, progress(1))
    facts = run.ends()
    assert (facts.job, facts.earlier_jobs, facts.rounds) == ("second", 1, 0)
    assert facts.ranks[0, 0].lives == 1


def test_start_that_is_repeated_in_a_cut_file_is_no_restart() -> None:
    start = {"kind": "start", "member": [0, 5], "job": "long"}
    run = Run().says(0, start, progress(1), progress(10))
    run.at_ns = 0  # the line as it was
    facts = run.says(0, start, progress(20)).ends()
    (rank,) = facts.of_rack(0)
    assert (rank.lives, facts.earlier_jobs) == (1, 0)
    assert rank.now is not None
    assert (rank.now.step, rank.now.bytes_sent) == (20, 100)


def test_the_same_name_founded_twice_is_two_runs() -> None:
    run = Run()
    for bits in ("aa", "bb"):
        run.says(0, {"kind": "start", "job": "mend"}, {"kind": "genesis", "racks": [0, 1]})
        run.both(commit(0, 1, {0: 1, 1: 1}, bits))
    facts = run.ends()
    assert (facts.job, facts.rounds, facts.earlier_jobs, facts.differences) == ("mend", 1, 1, [])


def test_a_second_run_tells_how_it_is_protected_itself() -> None:
    """Racks say so before their job is founded: of the second run in a folder it was forgotten, so
    the page did not warn of one that was open to the network."""
    run = Run()
    for job, protection in (("mend", "keys"), ("mend", "insecure"), ("other", "loopback")):
        for rack in (0, 1) if job == "mend" else (0,):
            run.says(rack, {"kind": "protection", "protection": protection})
        run.says(0, {"kind": "start", "job": job}, {"kind": "genesis", "racks": [0, 1]})
        run.says(0, progress(1))
        if protection == "insecure":
            run.says(1, progress(1))
            assert run.collector.facts.protection == {0: "insecure", 1: "insecure"}
    facts = run.ends()
    assert (facts.earlier_jobs, facts.protection) == (2, {0: "loopback"})


def test_many_faults_are_all_counted_and_the_first_and_last_are_kept() -> None:
    run = Run()
    for number in range(3 * FAULTS_SHOWN):
        run.says(0, {"kind": "frame-refused", "reason": f"reason {number}"})
    facts = run.ends()
    assert facts.fault_counts == {"frame-refused": 3 * FAULTS_SHOWN}
    said = [each.text for each in facts.faults]
    assert (len(said), said[0][:29]) == (2 * FAULTS_SHOWN, "a frame was refused: reason 0")
    assert said[-1].startswith(f"a frame was refused: reason {3 * FAULTS_SHOWN - 1}; see docs/")


def test_few_faults_are_shown_once_and_waiting_for_others_is_none() -> None:
    run = Run().says(0, {"kind": "fault", "detail": "x"}, {"kind": "waiting", "for": "rack 1"})
    assert [each.kind for each in run.says(0, {"kind": "leaving"}).ends().faults] == ["fault"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
KINDS = ("start", "genesis", "progress", "recorded", "commit", "captured", "applied", "lineage")
FIELDS = (
    "job", "step", "tokens", "at_ns", "stall_ms_total", "bytes_sent", "bytes_received", "values",
    "fragment", "version", "members", "digests", "reason", "seq", "fate", "last",
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING), st.sampled_from(KINDS) | ANYTHING)
def test_nothing_in_an_event_stops_the_reading(fields: dict[str, Any], kind: object) -> None:
    run = Run().says(0, progress(1), {**commit(0, 1, {0: 1}), **fields}, {**fields, "kind": kind})
    run.says(0, {**progress(2), **fields})
    run.ends()


def test_slow_links_are_kept_once_with_their_worst() -> None:
    slow = {"kind": "slow-link", "from_rack": 1, "to_rack": 0, "step": 40, "ratio": 3.5}
    run = Run().both(slow).says(0, {**slow, "step": 90, "ratio": 4.5})
    run.says(1, {**slow, "from_rack": "over there"})
    found = run.ends()
    assert list(found.slow_links) == [(1, 0)], "what mend does not write counts for nothing"
    assert (found.slow_links[1, 0].ratio, found.slow_links[1, 0].step) == (4.5, 90)
    (said,) = [v.answer for v in summary.verdicts(found, {}) if v.question == "Slow links"]
    assert said == "1 -> 0, 4.5x its own past per byte, found at step 90 of rack 0"


def test_the_rounds_that_a_rack_had_alone_at_the_end_are_a_verdict() -> None:
    """They were a line among the warnings only."""
    told = {"kind": "last-rounds-alone", "alone": 1, "rounds": 8, "tokens": 1200, "since_step": 24}
    found = Run().says(1, told).ends()
    (said,) = [each for each in summary.verdicts(found, {}) if each.question == "Last rounds"]
    assert (
        said.answer == "merged rack 1 alone: 8 rounds, 1,200 tokens, from its capture at step 24 on"
    )
    assert said.fine is False


def test_last_reason_of_an_evicted_rack_is_kept() -> None:
    evicted = {"kind": "slow-rack-evicted", "slow_rack": 1, "stage": 4, "reason": "rack 1 is slow"}
    left = {"kind": "roster", "racks": [0], "votes": [0], "reason": "rack 1 left"}
    run = Run().says(0, evicted).says(0, left)
    run.says(0, {**evicted, "reason": "rack 1 is slow again"}).says(0, left)
    assert run.ends().evicted == {1: "rack 1 is slow again"}
    own = {"kind": "evicted", "step": 9, "reason": "rack 1 is slow", "remedy": "start it again"}
    assert Run().says(1, own).ends().evicted == {1: "rack 1 is slow"}, "its own file is enough"


def test_an_eviction_that_an_earlier_job_announced_is_none_of_the_next() -> None:
    """A smaller job in the same folder "evicted" the rack that it never had."""
    evicted = {"kind": "slow-rack-evicted", "slow_rack": 1, "stage": 4, "reason": "rack 1 is slow"}
    run = Run().says(0, {"kind": "start", "job": "first"}, evicted)
    run.says(0, {"kind": "start", "job": "second"})
    run.says(0, {"kind": "roster", "racks": [0], "votes": [0], "reason": "rack 0 is alone"})
    assert run.ends().evicted == {}


def test_a_rack_whose_eviction_was_taken_back_was_not_evicted() -> None:
    evicted = {"kind": "slow-rack-evicted", "slow_rack": 1, "stage": 4, "reason": "rack 1 is slow"}
    stays = {**evicted, "kind": "slow-rack-awaited", "stage": 0, "reason": "it stays"}
    died = {"kind": "roster", "racks": [0], "votes": [0], "reason": "rack 1 was not there"}
    assert Run().says(0, evicted).ends().evicted == {}, "it has not left"
    assert Run().says(0, evicted).says(0, stays).says(0, died).ends().evicted == {}


def test_slow_racks_are_kept_once_with_their_worst() -> None:
    slow = {"kind": "fail-slow", "slow_rack": 1, "against": "own past", "step": 40, "ratio": 1.5}
    run = Run().both(slow).says(1, {**slow, "step": 90, "ratio": 2.5})
    run.says(0, {"kind": "fail-slow", "slow_rack": 1, "against": "peers", "ratio": "much"})
    cause = {"kind": "fail-slow-cause", "slow_rack": 1, "slow_rank": 3, "cause": "input"}
    run.says(1, cause).says(1, {**cause, "slow_rack": 0})
    facts = run.ends()
    found = facts.slow
    assert facts.causes[1] == "by the input of rank 3"
    assert list(found) == [(1, "own past")], "what mend does not write counts for nothing"
    assert (found[1, "own past"].ratio, found[1, "own past"].step) == (2.5, 90)


def test_a_rack_that_joins_again_counts_on_and_its_rounds_count_once() -> None:
    """Its second life goes on at the step of another rack: the tokens and bytes of the first were
    lost, and the rounds that it read in the log again were counted twice."""
    run = Run().says(0, {"kind": "start", "member": [0, 1], "plan": "p", "job": "j"})
    run.says(1, {"kind": "start", "member": [1, 1], "plan": "p", "job": "j"})
    for rack in (0, 1):
        run.says(rack, progress(1), progress(10), commit(0, 1, {0: 1, 1: 1}))
    run.says(1, {"kind": "start", "member": [1, 2], "plan": "p", "job": "j"})
    run.says(1, commit(0, 1, {0: 1, 1: 1}))
    again = {"bytes_sent": 7, "bytes_received": 7, "stall_ms_total": 0.0}
    run.says(1, progress(30, tokens=20, **again), progress(40, tokens=120, last=True, **again))
    for rack in (0, 1):
        run.says(rack, commit(0, 2, {0: 2, 1: 2}))
    facts = run.collector.finish()
    assert (facts.rounds, facts.agreed, facts.alone, facts.tokens_merged[1]) == (2, 2, 0, 200)
    rank = facts.ranks[1, 0]
    assert rank.now is not None
    assert (rank.lives, rank.closed, rank.now.step, rank.now.tokens) == (2, True, 40, 100 + 120)
    assert (rank.now.bytes_sent, rank.now.stall_ms) == (50 + 7, 20.0)


def test_resumed_run_is_not_reported_as_unmerged() -> None:
    """Its racks count on from the checkpoint, and the rounds of before are in other files: a run
    that merged everything since had a red verdict."""

    def merged(first: int) -> summary.Verdict:
        run = Run().both(progress(first)).both(commit(0, 1, {0: 1, 1: 1}))
        facts = run.both(progress(first + 9, last=True)).ends()
        totals = {rack: summary.total(facts, rack) for rack in facts.racks}
        (found,) = [v for v in summary.verdicts(facts, totals) if v.question == "Work merged"]
        return found

    assert (merged(1).answer, merged(1).fine) == ("100.0% of every rack's tokens", True)
    assert merged(100).answer.endswith("those of before it was resumed included")
    assert merged(100).fine is None


def test_work_merged_of_a_killed_rack_is_not_known() -> None:
    """Its last `progress` was older than its offers: 100 % of 10 tokens, in step 1."""
    run = Run().both(progress(1))
    captured = {"kind": "captured", "step": 30, "tokens": 100}
    run.both(captured).both(commit(0, 1, {0: 1, 1: 1})).says(0, progress(10, last=True))

    def found(run: Run) -> tuple[summary.Verdict, dict[int, summary.Total]]:
        facts = run.ends()
        totals = {rack: summary.total(facts, rack) for rack in facts.racks}
        (found,) = [v for v in summary.verdicts(facts, totals) if v.question == "Work merged"]
        return found, totals

    verdict, totals = found(run)
    assert (totals[0].merged_share, totals[1].merged_share) == (1.0, None)
    assert (totals[1].steps, totals[1].tokens) == (30, 100)
    assert (verdict.answer, verdict.fine) == (
        "100.0% of the other racks' tokens; not known of rack 1, whose counts are incomplete",
        None,
    )
    again = run.says(1, {"kind": "start"}, progress(1, last=True))
    assert "not known of rack 1" in found(again)[0].answer, "it is closed, but its counts are not"


def test_work_merged_of_a_running_job_is_a_lower_bound() -> None:
    run = Run().both({"kind": "captured", "step": 8, "tokens": 80})
    facts = run.both(progress(1)).both(commit(0, 1, {0: 1, 1: 1})).both(progress(40)).ends()
    totals = {rack: summary.total(facts, rack) for rack in facts.racks}
    (found,) = [v for v in summary.verdicts(facts, totals) if v.question == "Work merged"]
    assert (found.answer, found.fine) == ("at least 25.0% of every rack's tokens", None)


def test_figures_that_round_up_get_the_larger_unit() -> None:
    """999,999 tokens were `1e+03 k`."""
    figures = (0, 999, 999.4, 999.7, 999_499, 999_999, 12_345_678, 1e15)
    assert [summary.short(each) for each in figures] == [
        "0 ", "999 ", "999 ", "1 k", "999 k", "1 M", "12.3 M", "1e+03 T",
    ]  # fmt: skip


def test_values_of_a_follower_join_the_curves_of_the_first_rank() -> None:
    """At the tokens that it had trained by then, also in its second life."""
    value = {"kind": "recorded", "step": 4, "tokens": 0, "at_ns": 9, "values": {"held_merged": 2.5}}
    run = Run().both(progress(10)).follows(value).both(progress(3)).follows(value)
    run.follows({"kind": "progress"})
    facts = run.ends()
    assert facts.ranks.keys() == {(0, 0), (1, 0)}
    assert facts.ranks[0, 0].curves["held_merged"].tokens == [100, 130]
    assert facts.ranks[0, 0].curves["held_merged"].values == [2.5, 2.5]
