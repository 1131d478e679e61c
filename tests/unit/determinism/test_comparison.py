"""Planted faults are found: their step, module, direction and operator, and the likely cause."""

from __future__ import annotations

import re

import pytest

from mend.determinism.comparison import (
    Finding,
    Recording,
    compare,
    different_facts,
    likely_cause,
    recording_of,
    steps_of_all,
)
from mend.determinism.recorder import FORMAT, MODULE
from mend.errors import UsageError
from tests.unit.determinism.recorded import recorded


def parted(fault: str, step: int = 2, other: int = 1, **how: bool) -> Finding:
    """Two runs, the fault's step recorded in whole; `other`: microbatches of the second."""
    runs = [
        [recorded(fault, detail=step, microbatches=count, fault_step=step, **how)]
        for count in (1, other)
    ]
    finding = compare(*runs)
    assert finding is not None
    return finding


def test_an_atomic_add_is_found() -> None:
    finding = parted("atomic")
    place = (finding.direction, finding.module, finding.operator)
    assert place == ("forward", "tokens", "planted.atomic_sum.default")
    assert (finding.step, finding.rank) == (2, 0)
    assert "order depends on threads or time" in finding.cause


def test_an_atomic_add_of_the_backward_pass_is_found() -> None:
    finding = parted("atomic backward")
    assert (finding.step, finding.part) == (2, "gradients")
    assert finding.name == "first.weight"
    place = (finding.direction, finding.module, finding.operator)
    assert place == ("backward", "tokens", "planted.atomic_sum.default")


def test_an_operator_that_depends_on_the_batch_is_found() -> None:
    finding = parted("batch", 1, other=4)
    place = (finding.direction, finding.module, finding.operator)
    assert place == ("forward", "tokens", "planted.batch_sum.default")
    assert "how many rows" in finding.cause


def test_a_sum_over_the_batch_is_told_from_an_operator() -> None:
    """All rows are equal; gradients of microbatches are added one after another."""
    finding = parted("none", 1, other=4)
    assert finding.part == "gradients"
    assert (finding.direction, finding.operator) == ("backward", "")
    assert finding.name
    assert "added in another order" in finding.cause
    assert re.search(r"[1-9]\d* tensors were compared", finding.cause)


def test_rows_of_a_model_that_is_called_by_keywords_are_known() -> None:
    """torch's hooks do not see keywords: no row was known, and the batch's sum was blamed."""
    finding = parted("batch", 1, other=4, by_keyword=True)
    assert finding.operator == "planted.batch_sum.default"


def dealt(run: Recording, ranks: int) -> list[Recording]:
    """As if ranks had taken the microbatches in turn, with gradients summed in another order."""
    found = []
    for rank in range(ranks):
        mine = Recording(run.header | {"rank": rank, "ranks": ranks})
        mine.steps = {step: {**parts, "gradients": ""} for step, parts in run.steps.items()}
        for entry in run.entries[1]:
            turn, taker = divmod(entry["call"] - 1, ranks)
            if entry["call"] and taker == rank:
                mine.entries[1].append(entry | {"call": turn + 1})
        found.append(mine)
    return found


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("none", ("backward", "", "")),
        ("atomic", ("forward", "tokens", "planted.atomic_sum.default")),
        ("atomic backward", ("backward", "tokens", "planted.atomic_sum.default")),
    ],
)
def test_ranks_with_as_many_rows_as_microbatches_are_compared(
    fault: str, place: tuple[str, str, str]
) -> None:
    """Every tensor has one shape then. No tensor was said to have rows, and nothing compared."""
    one, other = (recorded(fault, detail=1, microbatches=4, fault_step=1) for _ in range(2))
    finding = compare([one], dealt(other, 2))
    assert finding is not None
    assert (finding.direction, finding.module, finding.operator) == place
    assert ("added in another order" in finding.cause) == (fault == "none")


def test_where_no_rows_are_known_nothing_is_blamed() -> None:
    runs = [recorded("none", detail=1, microbatches=count) for count in (1, 4)]
    for run in runs:
        for entry in run.entries[1]:
            for value in (*entry["in"], *entry["out"], *entry["changed"]):
                value[2] = ""
    finding = compare([runs[0]], [runs[1]])
    assert finding is not None
    assert (finding.operator, finding.direction) == ("", "")
    assert "nothing was compared" in finding.cause


def test_other_data_are_found() -> None:
    finding = parted("data")
    assert (finding.direction, finding.operator) == ("forward", "aten.mul.Tensor")
    assert "other data" in finding.cause
    finding = parted("clock")
    assert (finding.direction, finding.operator) == ("forward", "aten.add_.Tensor")
    assert "other numbers" in finding.cause
    assert "other rows" in parted("data", 1, other=2).cause


def test_other_weights_at_the_start_are_found() -> None:
    finding = parted("seed")
    assert (finding.step, finding.part, finding.name) == (1, "start", "first.weight")
    assert "not seeded" in finding.cause


def test_without_operators_the_step_is_found() -> None:
    finding = compare([recorded("atomic")], [recorded("atomic")])
    assert finding is not None
    assert (finding.step, finding.located) == (2, False)


def test_a_rank_that_was_stopped_a_step_earlier_ends_the_comparison() -> None:
    """Of two recordings that were made with --record, one stopped by Ctrl-C: a KeyError."""
    one, other = ([recorded("none"), recorded("none")] for _ in range(2))
    last = max(other[1].steps)
    del other[1].steps[last]
    finding = compare(one, other)
    assert finding is not None
    assert (finding.step, finding.part) == (last, "length")
    del one[1].steps[last]
    assert compare(one, other) is None
    assert steps_of_all(one) == last - 1, "no more than was compared is said to be equal"


def test_a_shorter_run_and_another_order_of_operators_are_told() -> None:
    finding = compare([recorded("none")], [recorded("none", steps=2)])
    assert finding is not None
    assert (finding.step, finding.part) == (3, "length")
    one, other = (recorded("none", detail=2) for _ in range(2))
    other.steps[2]["weights"] = "other"
    other.entries[2][7]["at"] = ["forward", "first", "aten.div.Tensor"]
    finding = compare([one], [other])
    assert finding is not None
    assert "control flow" in finding.cause


def test_a_collective_is_blamed_behind_an_operator_of_another_rank() -> None:
    """Rank 1's wrong bits reach rank 0 through a sum over ranks whose own input was equal."""

    def entry(name: str, given: str, made: str) -> dict[str, object]:
        hashed = ([[[1], each, ""]] for each in (given, made))
        at = ["backward", "", name]
        return dict(
            zip(
                ("step", "call", "at", "changed", "in", "out"), (1, 1, at, [], *hashed), strict=True
            )
        )

    def rank(number: int, product: str, total: str) -> list[dict[str, object]]:
        return [
            {"format": FORMAT, "rank": number, "ranks": 2, "facts": {}},
            entry("aten.mm.default", "x", product),
            entry("c10d.allreduce_.default", product, total),
            {"step": 1, "end": True, "gradients": total},
        ]

    def run(product: str, total: str) -> list[object]:
        return [recording_of(rank(0, "p", total)), recording_of(rank(1, product, total))]

    for other, operator, blamed in (
        (run("q", "t"), "aten.mm.default", 1),
        (run("p", "t"), "c10d.allreduce_.default", 0),
    ):
        finding = compare(run("p", "s"), other)  # type: ignore[arg-type]
        assert finding is not None
        assert (finding.operator, finding.rank) == (operator, blamed)


def test_a_view_of_memory_that_nobody_wrote_is_not_blamed() -> None:
    """DDP cuts its buckets before they are filled: their bits differ, and nothing reads them."""

    def run(rubbish: str, summed: str) -> list[Recording]:
        made: tuple[tuple[str, list[str], list[str]], ...] = (
            ("aten.empty.memory_format", [], []),
            ("aten.as_strided.default", [rubbish], [f"a part of {rubbish}"]),
            ("aten.sum.default", ["x"], [summed]),
        )
        entries = [
            {"step": 1, "call": 1, "at": ["forward", "", name], "changed": [], "view": number == 1}
            | {"in": [[[1], each, ""] for each in read], "out": [[[1], each, ""] for each in out]}
            for number, (name, read, out) in enumerate(made)
        ]
        header = {"format": FORMAT, "rank": 0, "ranks": 1, "facts": {}}
        return [recording_of([header, *entries, {"step": 1, "end": True, "losses": summed}])]

    finding = compare(run("p", "s"), run("q", "t"))
    assert finding is not None
    assert finding.operator == "aten.sum.default"


@pytest.mark.parametrize(
    ("operator", "cut", "no_inputs", "cause"),
    [
        (MODULE, False, False, "does not show"),
        ("c10d.allreduce_.default", False, False, "sum over ranks"),
        ("aten.normal_.default", False, True, "random"),
        ("aten.mm.default", True, False, "how many rows"),
        ("aten.addmm.default", False, False, "split-K"),
        ("aten.index_add.default", False, False, "atomics"),
        ("aten.upsample_bilinear2d_backward.default", False, False, "atomics"),
        ("aten.sum.dim_IntList", False, False, "order of a sum"),
        ("aten.exp.default", False, False, "another kernel"),
    ],
)
def test_likely_causes(operator: str, cut: bool, no_inputs: bool, cause: str) -> None:
    assert cause in likely_cause(operator, cut, no_inputs)


def test_facts_that_differ_are_listed() -> None:
    one, other = recorded("none", steps=1), recorded("none", steps=1)
    other.header["facts"]["threads"] = 99
    (fact,) = different_facts([one], [other])
    assert fact.startswith("threads: ")


def test_a_recording_of_another_format_is_refused() -> None:
    with pytest.raises(UsageError, match="format None"):
        recording_of([{}])
