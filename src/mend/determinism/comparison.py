"""Compares two recorded runs: finds the first step that differs, and in it the first operator that
makes different bits of equal inputs. Pure: reads the records of recorder.py.

Runs of one setting are compared entry by entry. Runs that cut the batch otherwise (microbatches,
ranks) are compared row by row: a row is known by the bits that the model was given for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from mend.determinism.recorder import FORMAT, MODULE
from mend.errors import UsageError

PARTS = ("start", "losses", "gradients", "weights", "optimizer")
"""Parts of a step, in the order of its computation."""

ROW_DIGITS = 16
"""Of the hash of one row, in hexadecimal."""

SUMS_WITH_ATOMICS = (
    *("index_add", "scatter_add", "scatter_reduce", "index_put", "embedding_dense_backward"),
    *("cumsum", "bincount", "histc", "put_", "grid_sampler", "upsample", "pool"),
)
PRODUCTS = ("mm", "linear", "matmul", "conv", "attention", "einsum", "dot", "mv")
SUMS = ("sum", "mean", "norm", "var", "std", "softmax", "loss", "prod", "logsumexp")
RANDOM = ("rand", "normal", "uniform", "bernoulli", "dropout", "multinomial", "exponential")


@dataclass
class Recording:
    """The records of one rank: its header, and its digests and entries by step."""

    header: dict[str, Any]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    entries: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def rank(self) -> int:
        return int(self.header["rank"])


Run = Sequence[Recording]
"""Recordings of all ranks, in their order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Where two runs begin to differ.

    `part`: of PARTS, or "length" (one run made fewer steps). `name`: the first parameter that
    differs there. `operator`: empty where none was found, or none was looked for (`located` says
    which); `direction`: forward, recompute, backward, optimizer. `measured`: the cause was shown by
    further runs, and is not only likely.
    """

    step: int
    part: str
    name: str = ""
    located: bool = False
    rank: int = 0
    direction: str = ""
    module: str = ""
    operator: str = ""
    line: str = ""
    """That calls the operator; of a backward operator that of the forward pass."""
    cause: str = ""
    measured: bool = False


def recording_of(records: Iterable[dict[str, Any]]) -> Recording:
    """Raises UsageError where the header is missing or of another format."""
    left = iter(records)
    header = next(left, {})
    if header.get("format") != FORMAT:
        raise UsageError(f"a recording of format {header.get('format')}; this mend reads {FORMAT}")
    recording = Recording(header)
    for record in left:
        if record.get("end"):
            recording.steps[record["step"]] = record
        else:
            recording.entries[record["step"]].append(record)
    return recording


def compare(one: Run, other: Run) -> Finding | None:
    """The first step and part that differ, and the operator if that step's were recorded. Raises
    UsageError for a run on a CPU and one on a GPU."""
    _refuse_other_hashes(one, other)
    finding = _first_part(one, other)
    if finding is None or finding.part in ("start", "length"):
        return finding
    entries = [each.entries.get(finding.step) for run in (one, other) for each in run]
    return _locate(finding, one, other) if all(entries) else finding


OTHER_HASHES = "a CPU and a GPU are hashed in ways of their own, so the digests say nothing"


def _refuse_other_hashes(one: Run, other: Run) -> None:
    places = [run[0].steps[1].get("devices") if run[0].steps else None for run in (one, other)]
    if None not in places and places[0] != places[1]:
        raise UsageError(
            f"devices={places[0]} of the parameters in one run, {places[1]} in the other: "
            f"{OTHER_HASHES}. Record both on the same kind of device"
        )


def different_facts(one: Run, other: Run) -> list[str]:
    """Of the headers: "threads: 1 and 2"."""
    left, right = one[0].header, other[0].header
    facts = {"ranks": (left["ranks"], right["ranks"])}
    facts |= {name: (left["facts"][name], right["facts"].get(name)) for name in left["facts"]}
    return [f"{name}: {a} and {b}" for name, (a, b) in facts.items() if a != b]


# steps


def steps_of_all(run: Run) -> int:
    """Steps that every rank recorded: of a run that was stopped, one may have more than another."""
    return min(max(each.steps, default=0) for each in run)


def _first_part(one: Run, other: Run) -> Finding | None:
    same_ranks = len(one) == len(other)
    ranks = range(len(one)) if same_ranks else range(1)
    last = [steps_of_all(run) for run in (one, other)]
    for step in range(1, min(last) + 1):
        for part in PARTS:
            for rank in ranks:
                left, right = (run[rank].steps[step] for run in (one, other))
                if part not in left and part not in right:
                    continue
                # Losses of other microbatches or other ranks are those of other rows.
                other_rows = part == "losses" and (
                    not same_ranks or len(left[part]) != len(right[part])
                )
                if not other_rows and left.get(part) != right.get(part):
                    return _explain_start(Finding(step, part, _name(left, right, part), rank=rank))
    if last[0] != last[1]:
        cause = f"the runs made {last[0]} and {last[1]} steps, equal as far as both go"
        return Finding(min(last) + 1, "length", cause=cause)
    return None


def _name(left: dict[str, Any], right: dict[str, Any], part: str) -> str:
    """The first parameter that differs, where they are recorded one by one."""
    pairs = zip(left.get(f"{part} by name", []), right.get(f"{part} by name", []), strict=False)
    return next((a[0] for a, b in pairs if a != b), "")


def _explain_start(finding: Finding) -> Finding:
    if finding.part != "start":
        return finding
    cause = (
        "the weights differ before the first step: the generator that initialises them is not "
        "seeded, or seeded otherwise, or another checkpoint was loaded"
    )
    return Finding(finding.step, "start", finding.name, True, finding.rank, cause=cause)


# operators

Hashed = list[Any]
"""[shape, hash, hashes of the rows]."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """One operator in both runs: in one call each, or in all calls of all ranks."""

    at: tuple[str, str, str]
    one: list[dict[str, Any]]
    other: list[dict[str, Any]]

    @property
    def line(self) -> str:
        return str(self.one[0].get("line", ""))


def _locate(finding: Finding, one: Run, other: Run) -> Finding:
    calls = [[_calls(each.entries[finding.step]) for each in run] for run in (one, other)]
    if calls[0] == calls[1]:
        return _first_of_ranks(finding, one, other)
    by_call = [_rows_of(run, finding.step) for run in (one, other)]
    if Counter(chain(*by_call[0])) != Counter(chain(*by_call[1])):
        cause = "the batches hold other rows: another order of the data, or another share of it"
        return _with(finding, ("forward", "", ""), cause)
    matched = _Rows(by_call[0], by_call[1])
    found = _search(_by_key(one, other, finding.step), matched)
    if found is not None:
        return _with(finding, found[0].at, found[1], line=found[0].line)
    if not matched.compared:
        cause = (
            "nothing was compared: no tensor has the rows of the batch as its first dimension, or "
            "the runs spread the rows otherwise over calls of equal size; give one run another "
            "number of microbatches"
        )
        return _with(finding, ("", "", ""), cause)
    cause = (
        f"no operator made other rows of equal rows ({matched.compared} tensors were compared row "
        f"by row or call by call, {matched.skipped} have no rows); what is left is the sum over "
        "the batch: its parts (microbatches, ranks) are added in another order"
    )
    return _with(finding, ("backward", finding.name, ""), cause)


def _with(
    finding: Finding, at: tuple[str, str, str], cause: str, rank: int = 0, line: str = ""
) -> Finding:
    return Finding(finding.step, finding.part, finding.name, True, rank, *at, line, cause)


def _calls(entries: list[dict[str, Any]]) -> int:
    return max(int(entry["call"]) for entry in entries)


def _first_of_ranks(finding: Finding, one: Run, other: Run) -> Finding:
    """An operator of one rank counts before a collective, which carries its bits to the others."""
    found = []
    for left, right in zip(one, other, strict=True):
        pairs = _side_by_side(left.entries[finding.step], right.entries[finding.step])
        if (each := _search(pairs, None)) is not None:
            pair, cause = each
            found.append(_with(finding, pair.at, cause, left.rank, pair.line))
    collective = [each.operator.startswith("c10d") for each in found]
    if not found:
        cause = "the operators of this step made equal bits; the difference is none of torch's"
        return _with(finding, ("", "", ""), cause)
    return min(zip(collective, range(len(found)), found, strict=True))[2]


def _side_by_side(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> Iterator[_Pair]:
    """Ends at the first place where the runs do different things, with a pair without others."""
    for left, right in zip(one, other, strict=False):
        at = tuple(left["at"])
        if left["at"] != right["at"]:
            yield _Pair(at, [left], [])
            return
        yield _Pair(at, [left], [right])


def _by_key(one: Run, other: Run, step: int) -> Iterator[_Pair]:
    """The entries of all calls of all ranks at the n-th (direction, module, operator)."""
    runs = [_entries_by_key(run, step) for run in (one, other)]
    for key, entries in runs[0].items():
        if key in runs[1]:
            yield _Pair(key[0], entries, runs[1][key])


def _entries_by_key(run: Run, step: int) -> dict[tuple[Any, int], list[dict[str, Any]]]:
    keyed: dict[tuple[Any, int], list[dict[str, Any]]] = defaultdict(list)
    for recording in run:
        counts: Counter[tuple[Any, int]] = Counter()
        for entry in recording.entries[step]:
            at = tuple(entry["at"])
            counts[at, entry["call"]] += 1
            keyed[at, counts[at, entry["call"]]].append(entry)
    return keyed


def _rows_of(run: Run, step: int) -> list[list[str]]:
    """Hashes of the rows that the model was given, by call, in the order of ranks and calls."""
    rows: list[list[str]] = []
    for recording in run:
        outer: dict[int, str] = {}
        for entry in recording.entries[step]:
            if entry["at"][2] == MODULE and entry["at"][0] == "forward" and entry["in"]:
                outer[entry["call"]] = entry["in"][0][2]  # the outermost module ends last
        rows += [_cut(outer[call]) for call in sorted(outer)]
    return rows


def _cut(rows: str) -> list[str]:
    return [rows[at : at + ROW_DIGITS] for at in range(0, len(rows), ROW_DIGITS)]


def _matched(one: Iterable[Hashable], other: Iterable[Hashable]) -> list[int]:
    """For each of `one` its place in `other`, which holds the same."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, each in reversed(list(enumerate(other))):
        places[each].append(place)
    return [places[each].pop() for each in one]


class _Rows:
    """Matches the rows of one run to those of the other, and calls of the same rows. Equal ones are
    taken in their order."""

    def __init__(self, one: list[list[str]], other: list[list[str]]) -> None:
        self.compared = self.skipped = 0
        self._place = _matched(chain(*one), chain(*other))
        self._call: list[int] = []
        """Empty where not all calls of one run are calls of the other."""
        calls = [list(map(tuple, run)) for run in (one, other)]
        if Counter(calls[0]) == Counter(calls[1]):
            self._call = _matched(*calls)

    def equal(self, one: list[Hashed], other: list[Hashed]) -> bool | None:
        """Of one value in all calls; None: it cannot be compared row by row."""
        shapes = {tuple(value[0]) for value in (*one, *other)}
        if len(shapes) == 1:  # it does not grow with the batch, or all calls have as many rows
            left, right = [value[1] for value in one], [value[1] for value in other]
            if len(set(left)) == len(set(right)) == 1:  # every call has the same
                return bool(left[0] == right[0])
            if not len(left) == len(right) == len(self._call):
                return None
            self.compared += 1
            return all(value == right[at] for value, at in zip(left, self._call, strict=True))
        rows = [[row for value in values for row in _cut(value[2])] for values in (one, other)]
        whole = len(rows[0]) == len(rows[1]) == len(self._place) > 0
        if not whole or len({tuple(shape[1:]) for shape in shapes}) > 1:
            self.skipped += 1
            return None
        self.compared += 1
        return all(row == rows[1][at] for row, at in zip(rows[0], self._place, strict=True))


def _search(pairs: Iterable[_Pair], rows: _Rows | None) -> tuple[_Pair, str] | None:
    """The first operator that made different bits of equal ones, or was given different bits that
    no operator had made. Rows: None where entries stand side by side."""
    made: set[str] = set()
    for pair in pairs:
        if not pair.other:
            return (
                pair,
                "the runs execute other operators from here on: their control flow parts",
            )
        given = _values(pair, "in", rows)
        # Between other batches only what is inside of modules is known to be the same thing.
        foreign = (rows is None or _in_module(pair)) and _is_foreign(pair, given, made)
        if foreign and pair.one[0].get("view"):
            continue  # it reads nothing: what it shows may be memory that is written later
        if foreign:
            return pair, _cause_of_input(pair.at)
        if rows is None and pair.one[0].get("numbers") != pair.other[0].get("numbers"):
            return pair, _NUMBERS
        inputs = [*given, *_values(pair, "changed", rows)]
        results = _values(pair, "out", rows)
        if all(inputs) and False in results:
            return pair, likely_cause(pair.at[2], rows is not None, not inputs)
        made.update(value[1] for entry in pair.one for value in entry["out"])
    return None


def _values(pair: _Pair, which: str, rows: _Rows | None) -> list[bool | None]:
    """For each input or result whether it is equal in both runs."""
    found: list[bool | None] = []
    columns = [
        zip(*(entry[which] for entry in side), strict=False) for side in (pair.one, pair.other)
    ]
    for left, right in zip(*columns, strict=False):
        if rows is None:
            found.append([value[:2] for value in left] == [value[:2] for value in right])
        else:
            found.append(rows.equal(list(left), list(right)))
    return found


def _in_module(pair: _Pair) -> bool:
    return bool(pair.at[1]) and pair.at[0] != "optimizer"


def _is_foreign(pair: _Pair, given: list[bool | None], made: set[str]) -> bool:
    if pair.at[2] == MODULE:
        return False
    for number, equal in enumerate(given):
        if equal is False and not {entry["in"][number][1] for entry in pair.one} & made:
            return True
    return False


def _cause_of_input(at: tuple[str, str, str]) -> str:
    if at[0] == "forward":
        return (
            "its input differs already, and no operator of this step made it: other data, another "
            "order of it, numbers from outside of torch (numpy, random, a clock), or state of an "
            "earlier step that is neither weight nor optimizer's"
        )
    return (
        "its input differs already, and no operator that torch shows made it: a kernel of a custom "
        "autograd function, a compiled region, or a collective"
    )


def likely_cause(operator: str, cut: bool, no_inputs: bool) -> str:
    """Why `operator` may make different bits of equal inputs. `cut`: the runs cut the batch
    otherwise, and the rows were compared."""
    space, _, name = operator.partition(".")
    name = name.partition(".")[0]
    if operator == MODULE:
        return (
            "a kernel inside of the module that torch does not show as an operator: custom or "
            "compiled code"
        )
    if space in ("c10d", "_c10d_functional"):
        return "the order of a sum over ranks, which the backend chooses; see ddp_hook and fix_fsdp"
    if no_inputs or any(word in name for word in RANDOM):
        return "random numbers: their generator is not seeded, or was drawn from otherwise"
    if cut:
        return (
            "its kernel, or the order in which it adds, depends on how many rows are in the batch; "
            'enable(level="shape") has one order'
        )
    if space not in ("aten", "prims"):
        return f"a kernel of {space}: {_ATOMIC}"
    if any(word in name for word in SUMS_WITH_ATOMICS):  # "upsample_bilinear" is not a product
        return _ATOMIC
    if any(word in name for word in PRODUCTS):
        return (
            "the order of the sum over K: another number of threads, split-K, another workspace or "
            "library, or TF32"
        )
    if any(word in name for word in SUMS):
        return "the order of a sum: another number of threads, or a reduction by atomics"
    return "another kernel was chosen: another number of threads, library or machine"


_NUMBERS = (
    "it was given other numbers beside its tensors: from a clock, a generator outside of torch, or "
    "a tensor that was read by .item()"
)

_ATOMIC = (
    "an add whose order depends on threads or time (atomics), or a read of memory that nobody "
    'wrote; enable(level="run") refuses those of torch'
)
