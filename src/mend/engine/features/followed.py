"""Serves followers of the merged model: where a rank's parts lie in the model, proofs of the
digests in the log, and differences between versions. Nothing waits for a follower.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mend.engine.compute.anchor import Anchor
from mend.engine.features.difference import difference_of
from mend.engine.loop.store import TensorStore
from mend.engine.state.fragment_state import FragmentState
from mend.fragment.model_plan import ModelPlan
from mend.fragment.shards import Shard
from mend.status.follow_messages import Part, Parts, Piece, encode_parts
from mend.types import ReadableKey, difference_key, layout_key, proof_key, readable_key


def parts_of(
    plan: ModelPlan,
    boxes: Sequence[dict[str, Shard]],
    rank: int,
    fragment_states: Sequence[FragmentState],
) -> Parts:
    """Where the parts of the weights and running statistics that this rank owns lie in the model.
    `boxes`: per rank of the rack, what it holds of every parameter and running statistic."""
    parts = []
    for number, (fragment, state) in enumerate(zip(plan.planned, fragment_states, strict=True)):
        if fragment.moments:
            continue
        pieces = []
        for slot, span in zip(fragment.layout.slots, state.owned.spans, strict=True):
            if (box := boxes[rank].get(slot.name)) is None:
                continue
            of = (slot.name, slot.dtype, slot.shape, box.shape, box.offset)
            pieces.append(Piece(*of, span.start, span.stop))
        parts.append(Part(number, tuple(pieces), moving=bool(fragment.statistics)))
    return Parts(rank, len(boxes), tuple(parts))


class Readable:
    """The bytes that a lane serves to followers, made when they are asked for. Any thread: it reads
    anchors, which never change, and keeps none of them."""

    def __init__(self, store: TensorStore, parts: Parts) -> None:
        self._store, self._parts = store, encode_parts(parts)
        self._lock = threading.Lock()
        self._differences: dict[int, tuple[bytes, bytes]] = {}
        """By fragment, (key, bytes) of the newest difference that was asked for."""

    def find(self, key: bytes) -> bytes | None:
        """The bytes of a key; None: this rank does not have them, or no longer."""
        asked, me = readable_key(key), self._store.me.rank
        if asked.kind == b"l":
            return self._parts if key == layout_key(me) else None
        anchor = self._store.anchors.get((asked.fragment, asked.version))
        if anchor is None:
            return None
        which = me, asked.fragment, asked.version
        if key == proof_key(*which, anchor.digest):
            return anchor.proof
        if key == difference_key(*which, asked.base, anchor.digest):
            return self._difference(key, asked, anchor)
        return None

    def _difference(self, key: bytes, asked: ReadableKey, anchor: Anchor) -> bytes | None:
        with self._lock:  # several followers ask for one: it is made once
            known, data = self._differences.get(asked.fragment, (b"", b""))
            if known == key:
                return data
            base = self._store.anchors.get((asked.fragment, asked.base))
            if base is None:
                return None
            data = difference_of(base.values, anchor.values)
            self._differences[asked.fragment] = key, data
            return data
