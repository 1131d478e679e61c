"""Moves a fragment's bytes through a rank: encodes own captures and serves the payloads, pulls
other racks' payloads and versions, and publishes decided versions.

Loop thread; workers touch the elements. `merging` makes one version of many payloads.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from mend.coordination import events as ev
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.offers import EncodedOffer
from mend.engine.loop.jobs import Jobs
from mend.engine.loop.pulls_ahead import Ahead, PullsAhead
from mend.engine.loop.store import TensorStore
from mend.engine.state.fragment_state import OpenOffer, Remainder
from mend.errors import NonFinite, format_error
from mend.events.kinds import OfferDeclined, OfferEncoded
from mend.types import Extent, Meter, state_key


class Pipeline:
    """Performs Encode, Fetch, Copy, PublishAnchor, DropAnchor and Free."""

    def __init__(self, store: TensorStore, jobs: Jobs) -> None:
        self._store, self._jobs, self._published = store, jobs, jobs.published
        self.ahead = PullsAhead(store)

    def encode(self, effect: ev.Encode) -> None:
        fragment, seq = effect.fragment, effect.seq
        store, tell, offer = self._store, self._jobs.tell, self._store.offers[fragment, seq]
        rules, numerics = store.rules[fragment], store.rules[fragment].numerics

        def job() -> tuple[EncodedOffer, tuple[int, int]]:
            if offer.encoding is not None:
                encoded = offer.encoding()
            else:
                if offer.landed is not None:
                    offer.landed()
                encoded = offer.encode(numerics, grows=partial(store.serve_growing, offer))
            return encoded, numerics.signs(encoded.payload, offer.anchor)

        def done(made: tuple[EncodedOffer, tuple[int, int]]) -> None:
            result, signs = made
            offer.remainder.set_result(Remainder(result.pend, result.sent))
            self._count(offer, numerics, result)
            store.put_payload((store.member, fragment, seq), result.payload, result.checksum)
            size = result.payload.numel() if rules.varies else 0
            tell(ev.Encoded(fragment, seq, result.checksum, "", result.norm, size, *signs))

        def declined(error: Exception) -> None:
            offer.remainder.set_exception(error)
            self._published.erred(str(error))
            store.host.note(OfferDeclined(fragment, seq, str(error)))
            tell(ev.Encoded(fragment, seq, "", declined="its delta is not finite"))

        self._jobs.run(job, done, declined, NonFinite)

    def _count(self, offer: OpenOffer, numerics: Numerics, encoded: EncodedOffer) -> None:
        """Count the bytes and note the offer."""
        size, fp32_bytes = encoded.payload.numel(), 4 * offer.delta_N.numel()
        residual = encoded.unsent / encoded.length if 0 < encoded.length < math.inf else 0.0
        moments, exact = numerics.of_values, numerics.codec.exact
        self._published.offered(size, fp32_bytes, residual, moments=moments)
        if moments or not exact:
            about = (offer.fragment, offer.seq, size, fp32_bytes, residual)
            self._store.host.note(OfferEncoded(*about, moments=moments))

    def fetch(self, effect: ev.Fetch) -> None:
        offer = effect.offer
        name = (offer.member, offer.fragment, offer.seq)
        rules, store = self._store.rules[offer.fragment], self._store
        size, most = rules.payload_bytes, rules.numerics.payload_bytes_max(rules.owned)
        if rules.varies and offer.sizes:
            size = offer.sizes[store.me.rank]
        if size > most:
            why = f"its offer has {size} bytes; the limit is {most}"
            self._jobs.tell(ev.Fetched(*name, error=why))
            return
        checksum = offer.checksum(store.me.rank) or "absent"

        def pull() -> None:
            payload_B = rules.numerics.buffers.empty(size, torch.uint8, locked=False)
            meter = store.pulls.begin(offer.member.rack, size)
            key, data = store.offer_key(name), payload_B.numpy().data
            ended = partial(done, meter, payload_B)
            store.host.fetch(effect.holders, key, checksum, data, ended, meter=meter)

        def done(meter: Meter, payload_B: Tensor, error: Exception | None, before: int = 0) -> None:
            store.pulls.end(offer.member.rack, meter, whole=error is None)
            if error is None:
                store.put_payload(name, payload_B, checksum)
            self._jobs.tell(ev.Fetched(*name, error=format_error(error), size=size - before))

        def came(ahead: Ahead, error: Exception | None) -> None:
            if error is None:
                done(ahead.meter, ahead.payload_B, None, ahead.before)
            else:
                store.pulls.end(offer.member.rack, ahead.meter, whole=False)
                pull()

        if not self.ahead.join(offer, size, checksum, came):
            pull()

    def copy(self, effect: ev.Copy) -> None:
        fragment, version = effect.fragment, effect.version
        rules, store = self._store.rules[fragment], self._store
        owned, numerics = rules.owned, rules.numerics
        data = numerics.empty(owned, locked=False)

        def finish(result: Anchor | Exception) -> None:
            error, good = "", isinstance(result, Anchor) and result.digest == effect.digest
            store.pulls.end(store.me.rack, meter, whole=good)
            if isinstance(result, Exception):
                error = format_error(result)
            elif result.digest != effect.digest:
                error = "the donor's bits are not those of the log"
            else:
                store.put_copy(fragment, result)
            self._published.copied(fragment, error)
            self._jobs.tell(ev.Copied(fragment, version, error=error))

        def done(error: Exception | None) -> None:
            if error is not None:
                finish(error)
            else:
                adopt = partial(numerics.adopt, data, owned, version, effect.rounds)
                first = partial(numerics.adopt_first, data, owned)
                self._jobs.run(adopt if version else first, finish, finish, Exception)

        key, data_B = state_key(store.me.rank, fragment, version, effect.digest), data.numpy().data
        extent, into_B = Extent(0, data_B.nbytes), data_B.cast("B")
        if not version:  # its outer states are zero
            into_B = into_B[: owned.numel * data.element_size()]
        meter = store.pulls.begin(store.me.rack, into_B.nbytes)
        store.host.fetch(effect.holders, key, "", into_B, done, extent, meter)

    def publish(self, effect: ev.PublishAnchor) -> None:
        self._published.publish(effect.fragment, self._store.publish(*effect.key))

    def drop_anchor(self, effect: ev.DropAnchor) -> None:
        fragment, version, attempt = effect.fragment, effect.version, effect.attempt
        self._store.free_anchor(fragment, version, attempt)
        if not attempt:
            self._published.forget(fragment, version)

    def free(self, effect: ev.Free) -> None:
        self._store.free_offer((effect.member, effect.fragment, effect.seq))
