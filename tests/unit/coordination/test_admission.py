"""Who gets in: equal plans, one life per rack, and nobody twice."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from mend.consensus.log import LogState
from mend.consensus.records import TEXT_MAX
from mend.coordination.admission import CONTENDED_MAX, VISITOR, Admission
from mend.coordination.events import Connect, Effect
from mend.coordination.member_view import MemberView
from mend.coordination.messages import Hello, Reason, Refusal
from mend.types import SECOND, Member, Peer
from tests.unit.coordination.nouns import (
    DETECT_NS,
    genesis,
    hello,
    log_of,
    member,
    notes,
    roster,
    seat,
    sent,
)


class Door:
    """Of a job of three racks that has begun, unless the log says otherwise."""

    def __init__(self, log: LogState | None = None, *, founders: bool = False) -> None:
        self.admission = Admission(3, "job", DETECT_NS)
        self.log = log_of(genesis(3)).appended if log is None else log
        self.now_ns = 100 * SECOND
        self.views = {
            rack: MemberView(seat.member, self.now_ns) for rack, seat in self.log.seats.items()
        }
        if founders:
            self.admission.hellos = {rack: hello(rack, racks=3) for rack in range(3)}

    def knock(self, body: Hello, sender: Member | None = None) -> tuple[bool, list[Effect]]:
        effects: list[Effect] = []
        fits = self.admission.hear(
            sender or body.seat.member, body, self.views, self.log, self.now_ns, effects
        )
        return fits, effects

    def silence(self, rack: int) -> None:
        self.views[rack].heard_ns = self.now_ns - DETECT_NS


def of(rack: int, life: int = 0, **changes: Any) -> Hello:
    return hello(rack, **{"racks": 3, "life": life, **changes})


def refused(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(body.kind, body.detail) for body in sent(effects) if isinstance(body, Refusal)]


NOT_BEGUN = LogState()


def test_reason_of_a_refusal_fits_into_the_orders_of_the_others() -> None:
    """Longer than a text may be, it would make these orders unreadable for every rack."""
    door, effects = Door(NOT_BEGUN), list[Effect]()
    door.admission.refuse(of(1), "plan", "x" * (TEXT_MAX + 1), "noted", effects)
    assert refused(effects) == [("plan", "x" * TEXT_MAX)]
    assert door.admission.refusals(()) == (Reason("x" * TEXT_MAX, refused=1),)


# -------------------------------------------------------------- into a job that runs


def test_a_rack_that_comes_later_waits_for_a_seat() -> None:
    door = Door(log_of(genesis(3), roster(1, [0, 1])).appended)
    newcomer = of(2, life=1)
    fits, effects = door.knock(newcomer)
    assert fits
    assert door.admission.joining == {2: newcomer}
    assert door.admission.hellos == {}, "it is no founder"
    assert effects[0] == Connect(Peer(2, 0), newcomer.seat.address)
    assert notes(effects, "hello") == [{"rack": 2, "address": newcomer.seat.address}]
    assert door.knock(newcomer) == (True, []), "told once"


def test_seated_rack_waits_no_longer() -> None:
    door = Door()
    for rack in (1, 2):
        door.silence(rack)
        door.knock(of(rack, life=1))
    door.admission.seated([member(1, life=1), member(2)])
    assert sorted(door.admission.joining) == [2], "its former life had one, it has none"


def test_a_newer_life_takes_the_place_of_an_older_one_that_waits() -> None:
    door = Door(log_of(genesis(3), roster(1, [0, 1])).appended)
    door.knock(of(2, life=1))
    door.knock(of(2, life=2))
    assert door.admission.joining == {2: of(2, life=2)}


def test_late_hellos_of_who_is_in_or_was_in_change_nothing() -> None:
    """They were under way when the rack was seated, or put out, or started again."""
    door = Door(log_of(genesis(3), roster(1, [0, 1])).appended)
    for late in (of(1), of(2)):
        assert door.knock(late) == (False, [])
    assert door.admission.joining == {}


def test_a_hello_in_the_name_of_another_life_is_nobodys() -> None:
    door = Door(NOT_BEGUN)
    assert door.knock(of(1), sender=member(1, life=1)) == (False, [])
    assert door.admission.hellos == {}


def test_a_rack_of_another_size_or_number_cannot_be_seated() -> None:
    door = Door()
    stranger = replace(of(1), seat=replace(seat(1), member=Member(7, 5)))
    remedy = "give every rack and the witness the same racks (MEND_RACKS)"
    for body, said in (
        (of(1, racks=2), "it is configured for racks=2, this job for racks=3: " + remedy),
        (stranger, "rack 7, but this job has racks 0 to 2 (rack, MEND_RACK)"),
    ):
        fits, effects = door.knock(body)
        assert not fits
        assert refused(effects) == [("racks", said)]
    fits, effects = door.knock(of(1), sender=Member(0, member(1).incarnation))
    assert not fits
    assert refused(effects) == [
        ("racks", "rack 1, but this job has racks 0 to 2 (rack, MEND_RACK)")
    ], "says rack 0"


def test_a_lockstep_job_is_begun_together_or_not_at_all() -> None:
    begin = genesis(3)
    lockstep = replace(begin, policy=replace(begin.policy, lockstep=True))
    door = Door(log_of(lockstep, roster(1, [0, 1])).appended)
    fits, effects = door.knock(of(2, life=1, lockstep=True))
    assert not fits
    ((kind, detail),) = refused(effects)
    assert kind == "plan"
    assert "restart all racks" in detail


def test_a_newcomer_with_other_settings_is_told_which() -> None:
    door = Door(log_of(genesis(3), roster(1, [0, 1])).appended)
    fits, effects = door.knock(of(2, life=1, staleness_max_rounds=9))
    assert not fits
    ((kind, detail),) = refused(effects)
    assert kind == "plan"
    assert "staleness_max_rounds" in detail


def test_a_newcomer_with_another_plan_is_told_the_difference() -> None:
    other = of(2, life=1, facts=(("model", "tiny"), ("steps", "9")))
    door = Door(log_of(genesis(3), roster(1, [0, 1])).appended, founders=True)
    fits, effects = door.knock(other)
    assert not fits
    assert refused(effects) == [("plan", "steps is 9 there and not here")]
    assert notes(effects, "refused")[0]["detail"] == "steps is 9 there and 8 here"
    assert door.admission.joining == {}


def test_new_coordinator_compares_plans_by_hash() -> None:
    """The founders' hellos were said to another coordinator."""
    other = of(2, life=1, facts=(("model", "tiny"), ("steps", "9")))
    door = Door(log_of(genesis(3), roster(1, [0, 1])).appended)
    _, effects = door.knock(other)
    ((kind, detail),) = refused(effects)
    assert kind == "plan"
    assert detail.startswith("its plan is ")
    assert door.log.plan[:12] not in detail
    assert door.log.plan[:12] in str(notes(effects, "refused")[0]["detail"])
    door.admission.hellos = {0: of(0, facts=(("model", "big"),))}
    _, effects = door.knock(other)
    assert refused(effects) == [("plan", detail)], "a hello of another plan is no measure"


def test_rack_that_joins_a_finished_job_hears_its_end_at_once() -> None:
    """It waited until its start timed out, and was told that nobody answers."""
    over = replace(roster(1, []), reason="all racks are done")
    door = Door(log_of(genesis(3), over).appended)
    fits, effects = door.knock(of(1, life=1))
    assert not fits
    ((kind, detail),) = refused(effects)
    assert kind == "over"
    assert detail.startswith("job 'job' is over: all its racks have left.")


def test_a_hello_that_may_be_older_than_the_seated_life_gets_no_seat() -> None:
    """The seated one is silent for a while: frozen, not dead."""
    door = Door()
    door.silence(1)
    stale = replace(of(1, life=1), after=())
    assert door.knock(stale) == (False, [])
    assert door.admission.joining == {}
    assert door.knock(of(1, life=1))[0]


def test_a_lockstep_job_whose_racks_are_all_silent_refuses_nobody() -> None:
    """They are being started again, as the refusal would ask for."""
    begin = genesis(3)
    lockstep = replace(begin, policy=replace(begin.policy, lockstep=True))
    door = Door(log_of(lockstep).appended)
    for rack in range(3):
        door.silence(rack)
    again = of(1, life=1, lockstep=True)
    assert door.knock(again) == (False, [])
    door.views[2].heard_ns = door.now_ns
    _, effects = door.knock(again)
    assert [kind for kind, _ in refused(effects)] == ["plan"]


# -------------------------------------------------------------- before the first record


def test_before_the_start_hellos_are_kept_and_repeated() -> None:
    door = Door(NOT_BEGUN)
    assert door.knock(of(1))[0]
    assert door.admission.hellos == {1: of(1)}
    door.views[1] = MemberView(member(1), door.now_ns)
    fits, effects = door.knock(of(1))
    assert (fits, effects) == (True, []), "it says so until it is answered"


def test_a_refusal_takes_nobodys_place_and_is_noted_once() -> None:
    door = Door()
    noted = []
    for _ in range(2):
        _, effects = door.knock(of(1, racks=2))
        assert Connect(Peer(1, VISITOR), seat(1).address) in effects
        assert sent(effects, Peer(1, VISITOR)) == sent(effects)
        noted.append(len(notes(effects, "refused")))
    assert noted == [1, 0]
    _, effects = door.knock(of(1, racks=4))
    assert len(notes(effects, "refused")) == 1, "another reason"


def test_numbers_from_the_network_do_not_become_connections_without_end() -> None:
    """All that are none of this job's racks are one visitor."""
    door, seen = Door(), set()
    for rack in range(1000, 1050):
        _, effects = door.knock(of(rack))
        assert refused(effects)
        seen |= {effect.peer for effect in effects if isinstance(effect, Connect)}
    assert seen == {Peer(3, VISITOR)}
    assert len(door.admission.refused) == 1


def test_hellos_of_ever_new_lives_do_not_fill_the_memory() -> None:
    """One entry each stayed for ever: 2.6 GB an hour at 10,000 hellos a second. Who waits through
    a few of them is still refused in its time."""
    door = Door()
    for life in range(2, CONTENDED_MAX + 100):
        door.knock(of(1, life=life))
    assert len(door.admission.contended_ns) == CONTENDED_MAX
    door.knock(of(1, life=1))
    for life in range(10):
        door.now_ns += DETECT_NS
        door.views[1].heard_ns = door.now_ns
        door.knock(of(2 - life % 2, life=10_000 + life))
    _, effects = door.knock(of(1, life=1))
    assert [kind for kind, _ in refused(effects)] == ["taken"]
