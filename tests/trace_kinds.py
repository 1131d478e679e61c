"""Numbers of what a trace hashes: kinds of notes, their fields, and the few words that decide.

Names and sentences are for people and may change; a trace must not change with them. So a trace
hashes the number of a kind, the places of its fields, and values that are numbers.

- A kind that gets another name keeps its number here. A new one gets the next number of all; that
  of one that is gone moves to GONE, and is never used again.
- A field that gets another name keeps its place. A new one goes to the end of its kind; one that
  is gone leaves "" at its place.
- A field that has no place is text, which is not hashed.

tests/sim/test_trace_kinds.py compares this table with the notes in the source.
"""

from __future__ import annotations

from mend.events.base import LoggedEvent, kind_of

KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    # the coordinator, the votes, who has a seat
    "genesis": (1, ("racks",)),
    "hello": (2, ("rack",)),
    "refused": (3, ("rack",)),
    "waiting": (4, ("seconds",)),
    "resumes": (5, ("checkpoint", "without", "versions")),
    "buffers-differ": (6, ()),
    "coordinator-silent": (7, ()),
    "coordinator-back": (8, ()),
    "stands": (9, ("ballot", "silent_ms")),
    "stands-no-more": (10, ("ballot",)),
    "takes-over": (11, ("ballot", "record")),
    "deposed": (12, ("ballot",)),
    "no-quorum": (13, ("ballot",)),
    "lineage": (14, ("without", "versions")),
    "gives-up": (15, ("records", "versions")),
    "retired": (16, ("rack",)),
    "roster": (17, ("racks", "votes")),
    "fault": (18, ()),
    "snapshot": (19, ("record",)),
    "expelled": (20, ()),
    "rack-silent": (21, ("peer",)),
    "rack-back": (22, ("peer",)),
    "seat-lost": (23, ()),
    "job-lost": (24, ()),
    "other-job": (25, ("from_rack",)),
    # rounds
    "captured": (26, ("step", "fragment", "seq", "base", "tokens", "steps", "closing")),
    "still-open": (27, ("step", "fragment", "seq")),
    "encoded": (28, ("fragment", "seq", "bytes", "fp32_bytes", "moments")),
    "declined": (29, ("fragment", "seq")),
    "fetch-failed": (30, ("rack", "fragment", "seq")),
    "merge-failed": (31, ("fragment", "version")),
    "sums-failed": (32, ("fragment", "version")),
    "decided": (33, ("fragment", "version")),
    "commit": (
        34,
        (
            "fragment", "version", "members", "live", "absent", "dropped", "part", "rounds",
            "momentum", "moments",
        ),
    ),
    "drop": (35, ("fragment", "racks")),
    "differs": (36, ("fragment", "version")),
    "applied": (37, ("step", "fragment", "version", "fate", "seq")),
    "discarded": (38, ("step", "fragment", "seq")),
    "diverged": (39, ("step", "fragment")),
    "stall-over": (40, ("step", "fragments", "ms")),
    "same-data": (41, ("racks",)),
    "rounds-short": (42, ()),
    "late-steps": (43, ("steps",)),
    "last-rounds-alone": (44, ()),
    "statistics-reset": (45, ("step",)),
    "weights-replaced": (46, ("differ_pct",)),
    # who joins, and with what
    "joined": (47, ("versions",)),
    "copied": (48, ("fragment", "version")),
    "copy-failed": (49, ("fragment", "version")),
    "state-given": (50, ("to", "step", "bytes", "ms")),
    "state-copied": (51, ("donor", "step", "bytes")),
    "state-copy-failed": (52, ("donor", "step")),
    "state-fresh": (53, ()),
    "state-loaded": (54, ()),
    "state-unclaimed": (55, ()),
    "made-equal": (56, ("and_more",)),
    "mirror-kept": (57, ("peer", "step", "bytes")),
    "mirror-missed": (58, ("peer", "step")),
    "mirror-failed": (59, ("peer", "step")),
    "mirror-loaded": (60, ("peer", "step", "bytes")),
    "mirror-refused": (61, ("step",)),
    "scheduler-registered": (62, ()),
    "scheduler-refused": (63, ()),
    "rates-differ": (64, ()),
    # checkpoints
    "mark": (65, ("number", "racks", "written")),
    "checkpoint": (66, ("step", "number", "versions", "cut_ms", "taken_ms", "written_ms")),
    "checkpoint-moved": (67, ()),
    "state-dict": (68, ("step", "number", "versions")),
    "resumed": (69, ("step", "versions", "open_tokens")),
    "resume-lost": (70, ("lost", "open_tokens")),
    "resume-recut": (71, ("ranks",)),
    "resume-ignored": (72, ("open_tokens",)),
    # slow racks
    "fail-slow": (
        73,
        ("slow_rack", "slow_rank", "against", "step", "since_step", "ratio", "probability"),
    ),
    "fail-slow-over": (
        74,
        ("slow_rack", "slow_rank", "against", "step", "since_step", "ratio"),
    ),
    "fail-slow-cause": (
        75,
        ("slow_rack", "slow_rank", "cause", "link_to", "ratio", "gemm_ratio", "input_share",
         "lane_ratios"),
    ),
    "slow-link": (
        76,
        ("from_rack", "to_rack", "rank", "step", "since_step", "ratio", "probability", "mb_s"),
    ),
    "slow-link-over": (77, ("from_rack", "to_rack", "rank", "step", "since_step", "ratio")),
    "slow-rack-left": (78, ("slow_rack", "stage", "batch_pct")),
    "slow-rack-awaited": (79, ("slow_rack", "stage", "batch_pct")),
    "slow-rack-batch": (80, ("slow_rack", "stage", "batch_pct")),
    "slow-rack-evicted": (81, ("slow_rack", "stage", "batch_pct")),
    "evicted-rack-lost": (82, ("slow_rack", "stage", "batch_pct")),
    "local-batch": (83, ("step", "batch_pct")),
    "evicted": (84, ("step",)),
    "eviction-failed": (85, ("step",)),
    # the end
    "leaving": (86, ("at_most_s",)),
    "left-alone": (87, ("open_tokens",)),
    "kept-local": (88, ("open_tokens",)),
    "drain-gave-up": (89, ("open_tokens",)),
    "ended": (90, ("step", "tokens", "tokens_merged")),
    "ended-unmerged": (91, ("step", "tokens", "tokens_merged")),
    # of live processes only
    "start": (92, ("member",)),
    "protection": (93, ()),
    "counting": (94, ("parameters", "exchanged")),
    "progress": (95, ("step", "tokens", "at_ns", "bytes_sent", "bytes_received", "last")),
    "recorded": (96, ("step", "tokens", "at_ns")),
    "pulling": (97, ("peer",)),
    "pulls-work": (98, ()),
    "pulls-fail": (99, ("failures",)),
    "name-unknown": (100, ()),
    "close-gave-up": (101, ()),
    "strangers": (102, ("handshakes",)),
    "frame-refused": (103, ("count",)),
    "buffers-changed": (104, ()),
    "port-waits": (105, ("max_s",)),
    "undone": (106, ("dead",)),
    "pulled": (107, ("rack", "bytes", "ms")),
    "invariant-broken": (108, ()),
    "observer-unanswered": (109, ()),
    "data": (110, ("done", "open", "left", "again")),
    "racks-apart": (111, ("merges",)),
    "locks-memory": (112, ("gb",)),
    "rows-awaited": (113, ("step",)),
    "offers-grow": (114, ("fragment", "version")),
}  # fmt: skip
"""kind -> its number, and those of its fields that are hashed."""

GONE: frozenset[int] = frozenset()
"""Numbers of kinds that were here once."""

WORDS = {
    "none": 0, "named": 1, "dropped": 2,
    "own past": 3, "peers": 4,
    "compute": 5, "link": 6, "input": 7, "unknown": 8,
}  # fmt: skip
"""Numbers of the words that a hashed field may hold: fates of offers, what a slow rack is compared
with, and why it is slow."""

BITS = frozenset(
    {"digest", "digests", "checksum", "norm", "residual", "balance", "cosine", "growth"}
)
"""Fields that follow from the arithmetic of this machine; not hashed."""


def numbered(event: LoggedEvent) -> tuple[object, ...]:
    """The number of an event's kind, and (place, value) of its fields in the order of places; those
    that have their defaults are left out.

    KeyError: the kind, a field with numbers, or a word of a hashed field is not in these tables.
    """
    kind, fields = kind_of(event), event.fields()
    if kind not in KINDS:
        raise KeyError(f"give {kind!r} the next number in tests/trace_kinds.py")
    number, places = KINDS[kind]
    for name, value in fields.items():
        if name not in places and name not in BITS and not _is_text(value):
            raise KeyError(f"give {name!r} of {kind!r} a place in tests/trace_kinds.py: {value!r}")
    values = [(at, _plain(fields[name])) for at, name in enumerate(places, 1) if name in fields]
    return (number, *values)


def _is_text(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_text, value))
    return isinstance(value, str)


def _plain(value: object) -> object:
    """The numbers of a value, without names: keys and types do not count, their order does."""
    match value:
        case None | float():
            return value
        case int():  # also of a bool or an enumeration
            return int(value)
        case str():
            return WORDS[value]
        case list() | tuple():
            return tuple(map(_plain, value))
        case dict():
            return tuple(map(_plain, value.values()))
    raise KeyError(f"a trace hashes numbers, and this is none: {value!r}")
