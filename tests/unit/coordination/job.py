"""A coordinator and what racks say to it, under the test's own clock."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.records import Offer, Record
from mend.coordination.admission import VISITOR
from mend.coordination.coordinator import Coordinator, CoordinatorOptions
from mend.coordination.events import Effect, Heard, Tick
from mend.coordination.messages import Held, Hello, Orders, Prepare, Refusal, Report, Vote
from mend.types import SECOND, WITNESS, Peer
from tests.unit.coordination.nouns import (
    DETECT_NS,
    HEARTBEAT_NS,
    acceptor_state,
    digest,
    hello,
    member,
    offer_id,
    report,
    sent,
)


class Job:
    """`say` changes what a rack reports; `follow` lets racks accept all that was written."""

    def __init__(
        self, racks: int = 2, *, witness: bool = False, fragments: int = 1, **policy: Any
    ) -> None:
        self.racks, self.fragments, self.policy = racks, fragments, policy
        me = Peer(WITNESS, 0) if witness else Peer(0, 0)
        options = CoordinatorOptions(racks, HEARTBEAT_NS, DETECT_NS)
        self.acceptor = Acceptor()
        self.machine = Coordinator(me, member(me.rack), "job", options, self.acceptor)
        self.votes = 0
        self.now_ns = 100 * SECOND
        self.to = member(me.rack).incarnation
        self.reports = {rack: report(0, fragments, to=self.to) for rack in range(racks)}
        self.lives = dict.fromkeys(range(racks), 0)
        self.orders: dict[int, Orders] = {}
        """The newest that every rack was sent."""

    def hello(self, rack: int, **changes: Any) -> list[Effect]:
        """A founder is asked to begin the job, and promises it at once."""
        fields = {"racks": self.racks, "fragments": self.fragments, **self.policy, **changes}
        life = changes.get("life", 0)
        effects = self.hear(rack, hello(rack, **fields), life)
        view = self.machine.views.get(rack)
        if not self.machine.log.committed.begun and view and view.member == member(rack, life):
            if self.lives[rack] != life:
                self.reports[rack] = report(0, self.fragments, to=self.to)
            self.lives[rack] = life
            effects += self.say(rack)
        return effects

    def hear(self, rack: int, body: Hello | Report, life: int = 0) -> list[Effect]:
        return self._give(Heard(Peer(rack, 0), member(rack, life).incarnation, body))

    def say(self, rack: int, **changes: Any) -> list[Effect]:
        """Everything else of the rack's report stays as it was. `accepted`, `decided`: how far its
        log goes in the coordinator's ballot, and how far it is decided there."""
        before = self.reports[rack].acceptor_state
        changes["acceptor_state"] = acceptor_state(
            changes.pop("accepted", before.last),
            changes.pop("decided", before.decided),
            self.machine.proposer.ballot,
        )
        heard = self.orders[rack].serial if rack in self.orders else 0
        changes = {"heard": heard, "serial": self.reports[rack].serial + 1, **changes}
        self.reports[rack] = replace(self.reports[rack], **changes)
        return self.hear(rack, self.reports[rack], self.lives[rack])

    def tick(self, after_ns: int = 0) -> list[Effect]:
        self.now_ns += after_ns
        return self._give(Tick())

    def sleep(self, for_ns: int) -> list[Effect]:
        """The process gets no processor for so long, and then runs."""
        self.now_ns += for_ns
        return self._give(Tick(), awake=False)

    def _give(self, event: Heard | Tick, *, awake: bool = True) -> list[Effect]:
        """`awake`: it ran until now, though nothing came."""
        if awake:
            self.machine.sleep.clock.ran_ns = self.now_ns
        effects = self.machine.handle(event, self.now_ns)
        if self.machine.me.rack == WITNESS:
            effects += self._own_vote()
        for rack in range(self.racks):
            for body in sent(effects, Peer(rack, 0)):
                assert isinstance(body, Orders | Prepare | Refusal)
                if isinstance(body, Orders):
                    self.orders[rack] = body
        return effects

    def _own_vote(self) -> list[Effect]:
        """The witness's own vote takes what is appended at once."""
        log = self.machine.log
        if not log.last:
            return []  # a question about another job than its own
        if self.acceptor.log.last == log.last and self.acceptor.log.decided == log.decided:
            return []
        return self.vote()

    def vote(self) -> list[Effect]:
        """The witness answers its own orders, as it does with every heartbeat."""
        log = self.machine.log
        self.votes += 1
        ballot = self.machine.proposer.ballot
        self.acceptor.append(ballot, 0, "", log.after(0), log.last, log.decided)
        vote = Vote(self.votes, log.lineage, self.acceptor.acceptor_state(), ())
        return self._give(Heard(Peer(WITNESS, 0), member(WITNESS).incarnation, vote))

    # -------------------------------------------------------------- what racks usually do

    def begun(self) -> Job:
        """All racks are in and have accepted Genesis."""
        for rack in range(self.racks):
            self.hello(rack)
        self.follow()
        assert self.machine.log.decided == 1
        return self

    def come_back(self, rack: int) -> list[Effect]:
        """As a new member that holds nothing; its former life must be silent by now."""
        self.lives[rack] += 1
        blank = (-1,) * self.fragments
        self.reports[rack] = report(0, self.fragments, to=self.to, versions=blank)
        return self.hello(rack, life=self.lives[rack])

    def follow(self, *racks: int) -> list[Effect]:
        """These racks (all, if none is named) accept the log as it is."""
        effects: list[Effect] = []
        for rack in racks or range(self.racks):
            effects += self.say(rack, accepted=self.machine.log.last)
        for rack in racks or range(self.racks):
            effects += self.say(rack, decided=self.machine.log.decided)
        return effects

    def offered(self, *offers: Offer) -> list[Effect]:
        """These are announced by their racks, and fetched by all others."""
        effects: list[Effect] = []
        for each in offers:
            effects += self.say(each.member.rack, offers=(each,))
        for rack in range(self.racks):
            others = tuple(offer_id(each) for each in offers if each.member.rack != rack)
            effects += self.say(rack, got=others)
        return effects

    def held(self, *racks: int, result: int | None = None) -> list[Effect]:
        """These racks have merged what the newest orders ask for."""
        effects: list[Effect] = []
        for rack in racks or range(self.racks):
            found = tuple(
                held_of(proposal.fragment, proposal.version, proposal.attempt, result)
                for proposal in self.orders[rack].proposals
            )
            effects += self.say(rack, held=found)
        return effects

    def committed(self, *offers: Offer) -> None:
        """A whole round."""
        versions = list(self.machine.log.committed.versions)
        self.offered(*offers)
        self.held()
        self.follow()
        versions[offers[0].fragment] += 1
        assert self.machine.log.committed.versions == versions
        for rack in range(self.racks):
            self.say(rack, versions=tuple(versions), offers=(), got=(), held=())

    @property
    def records(self) -> list[Record]:
        log = self.machine.log
        return list(log.after(0))

    def refusals(self, effects: list[Effect], rack: int) -> list[tuple[str, str]]:
        bodies = sent(effects, Peer(rack, VISITOR))
        return [(body.kind, body.detail) for body in bodies if isinstance(body, Refusal)]


def held_of(fragment: int, version: int, attempt: int, result: int | None = None) -> Held:
    return Held(fragment, version, attempt, (digest(1000 * version if result is None else result),))
