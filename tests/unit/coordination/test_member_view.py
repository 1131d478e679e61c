"""What the coordinator knows of a member, and who holds what."""

from __future__ import annotations

import random

from mend.coordination.member_view import Holders, MemberView
from mend.coordination.messages import OfferId
from tests.unit.coordination.nouns import member, offer, offer_id, report


def test_holders_are_what_the_views_say_whatever_came_before() -> None:
    """They follow what has changed; here they are compared with a count of everything."""
    chance, holders = random.Random(1), Holders()
    offers = [offer_id(offer(rack, seq)) for rack in range(4) for seq in (1, 2, 3)]
    views: dict[int, MemberView] = {}
    for step in range(200):
        rack = chance.randrange(4)
        if chance.random() < 0.1:
            views.pop(rack, None)
        elif chance.random() < 0.2 or rack not in views:
            views[rack] = MemberView(member(rack, step), 0)
        else:
            got = tuple(chance.sample(offers, chance.randrange(len(offers))))
            views[rack].hears(report(step, got=got), 1)
        expected: dict[OfferId, set[int]] = {}
        for holder, view in views.items():
            for each in view.got:
                expected.setdefault(each, set()).add(holder)
        assert holders.follow(views) == expected


def test_holder_of_an_offer_of_a_former_life_does_not_hold_that_of_the_new_life() -> None:
    """They have the same number: a rack counts from 1 in each of its lives."""
    view = MemberView(member(0), 0)
    view.hears(report(1, got=(offer_id(offer(1, life=0)),)), 1)
    found = Holders().follow({0: view})
    assert offer_id(offer(1, life=0)) in found
    assert offer_id(offer(1, life=1)) not in found
