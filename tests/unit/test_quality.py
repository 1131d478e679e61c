"""The quality harness compares like with like, its DiLoCo is the textbook's, and its table says
what the numbers say."""

from __future__ import annotations

import email
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import quality, quality_arms, quality_table
from benchmarks.quality_arms import ARMS, CORE, Arm, Cell, Curve, Inner, Outer, Plan, windows_of
from mend.errors import UsageError
from mend.tools.demo_corpus import Corpus
from mend.tools.demo_model import Size, loss_of

PLAN = Plan(
    size=Size(16, 1, 2, 16, 2), steps=16, period_steps=4, eval_steps=8, eval_batches=2,
    learning_rate=1e-2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def texts(racks: int) -> Corpus:
    """Some real text, another one for each rack; not of mend, whose comments change."""
    found = [path.read_bytes() for path in sorted(Path(email.__file__).parent.glob("*.py"))]
    assert len(found) > racks
    return Corpus(tuple(found[1 : racks + 1]), found[0])


def cell(arm: str, racks: int = 2, seed: int = 1) -> Cell:
    return Cell(plan=PLAN, arm=arm, racks=racks, seed=seed)


# ------------------------------------------------------------------ the arms


def test_all_arms_train_on_equal_tokens_and_look_at_equal_times() -> None:
    """Those of one process; a run of mend is held to the same count, below and by `run` itself."""
    found = [
        quality.run(cell(arm), texts(2))
        for arm in ("alone", "data-parallel", "diloco", "page-concurrent")
    ]
    assert {row["tokens"] for row in found} == {2 * 16 * 2 * 16}
    assert {tuple(tokens for tokens, _ in row["curve"]) for row in found} == {(256, 512)}
    assert len({row["weights"] for row in found}) == 4, "the arms are not four different things"
    assert all(row["loss"] == row["curve"][-1][1] < math.log(256) for row in found)


def test_a_run_repeats_bit_for_bit_and_another_seed_is_another_run() -> None:
    first, again = (quality.run(cell("diloco"), texts(2)) for _ in range(2))
    assert (first["weights"], first["curve"]) == (again["weights"], again["curve"])
    assert quality.run(cell("diloco", seed=2), texts(2))["weights"] != first["weights"]


def test_a_count_that_is_not_the_plan_s_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quality.KINDS, "alone", lambda *_: {"tokens": 1023})
    with pytest.raises(AssertionError, match="1023 tokens, not 1024"):
        quality.run(cell("alone"), texts(2))


def test_diloco_of_one_rack_without_outer_momentum_is_plain_training_bit_for_bit() -> None:
    plain = quality.run(cell("data-parallel", racks=1), texts(1))
    assert quality.run(cell("diloco", racks=1), texts(1))["weights"] == plain["weights"]
    textbook = quality.run(cell("diloco-textbook", racks=1), texts(1))
    assert textbook["weights"] != plain["weights"], "its momentum did nothing"


def test_the_outer_step_is_the_textbook_s() -> None:
    """Worked by hand: lr .7, Nesterov .9.

    Round 1: deltas .5 and .3, mean .4, b = .4, step .7 (.4 + .9 .4) = .532 -> .468.
    Round 2: deltas .2 and .4, mean .3, b = .9 .4 + .3 = .66, step .7 (.3 + .9 .66) = .6258
    -> -.1578.
    """
    racks = [nn.Linear(1, 1, bias=False).double() for _ in range(2)]

    def place(*values: float) -> None:
        for rack, value in zip(racks, values, strict=True):
            nn.init.constant_(rack.weight, value)

    place(1.0, 1.0)
    outer = Outer(racks[0], ARMS["diloco-textbook"])
    for values, after in (((0.5, 0.7), 0.468), ((0.268, 0.068), -0.1578)):
        place(*values)
        outer.merge(racks)
        assert [rack.weight.item() for rack in racks] == pytest.approx([after] * 2, abs=1e-15)


def test_data_parallel_takes_the_gradient_of_all_racks_batches_together() -> None:
    here, text = cell("data-parallel"), texts(2)
    inner = Inner(here, [windows_of(here, text, rack) for rack in range(2)])
    both = torch.cat([windows_of(here, text, rack).next() for rack in range(2)])
    one, _ = quality_arms.fresh(here)
    loss_of(one, both).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(one.parameters(), quality_arms.CLIP_NORM)
    inner.step(0)
    for ours, whole in zip(inner.model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, whole.grad, atol=1e-6, rtol=1e-4)


def test_two_racks_see_other_data_and_two_arms_the_same() -> None:
    same = Corpus((texts(1).racks[0],) * 2, b"")

    def batches(arm: str, rack: int, corpus: Corpus, seed: int = 1) -> torch.Tensor:
        windows = windows_of(cell(arm, seed=seed), corpus, rack)
        return torch.stack([windows.next() for _ in range(4)])

    for corpus in (texts(2), same):
        assert not torch.equal(batches("diloco", 0, corpus), batches("diloco", 1, corpus))
    assert not torch.equal(batches("alone", 0, same), batches("alone", 0, same, seed=2))
    for arm in ARMS:
        assert torch.equal(batches(arm, 1, same), batches("alone", 1, same))
    seeds = {
        1 + rack + 64 * (racks + 64 * seed)
        for racks in (2, 4)
        for rack in range(racks)
        for seed in (1, 2, 3)
    }
    assert len(seeds) == 18


def test_the_real_text_differs_by_rack_and_nobody_trains_on_what_is_held_out() -> None:
    one, other = (quality_arms.text_hash(texts(racks)) for racks in (2, 3))
    assert one != other
    assert quality_arms.text_hash(texts(2)) == one
    parts = [*texts(2).racks, texts(2).held_out]
    assert quality_arms.text_hash(Corpus(tuple(parts[1:]), parts[0])) != one


def test_the_settings_of_an_arm() -> None:
    taus = {name: quality_arms.overlap_of(arm, 64) for name, arm in ARMS.items()}
    assert (taus["mend-blocking"], taus["mend-concurrent"], taus["page-tau-16"]) == (0, 8, 16)
    assert quality_arms.overlap_of(ARMS["mend-concurrent"], 16) == 4
    told = quality_arms.settings_of_mend(ARMS["mend-default-lockstep"], cell("alone"))
    assert told == {
        "outer_ramp_rounds": None, "outer_optimizer_momentum": None, "lockstep": True,
    }  # fmt: skip
    assert quality_arms.settings_of_mend(ARMS["mend-blocking"], cell("alone"))["overlap_steps"] == 0
    model, _ = quality_arms.fresh(cell("page-long"))
    settings = quality_arms.settings_of(ARMS["page-long"], cell("page-long"), model)
    assert (settings.period, settings.overlap, len(settings.fragments)) == (8, 2, 4)
    parameters = sorted(index for part in settings.fragments for index in part)
    assert parameters == list(range(len(list(model.parameters()))))


def test_the_page_without_overlap_is_diloco_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of the same rule, one in fp32 and one in fp64; one fragment, so that both merge
    at the same steps."""
    here = Arm(kind="page", says="", fragments=1, overlap_steps=0)
    monkeypatch.setitem(ARMS, "page-plain", here)
    found, other = (quality.run(cell(arm), texts(2)) for arm in ("page-plain", "diloco"))
    assert found["loss"] == pytest.approx(other["loss"], abs=1e-4)
    late = quality.run(cell("page-one-fragment"), texts(2))
    assert abs(late["loss"] - other["loss"]) > 1e-3, "the overlap did nothing"


def test_the_mean_of_several_models_is_a_point_of_the_curve() -> None:
    models = [quality_arms.fresh(cell("alone", seed=seed))[0] for seed in (1, 2)]
    curve = Curve(cell("alone"), texts(2))
    curve.look(8, *models)
    losses = [curve.loss(model) for model in models]
    assert curve.points == [(256, math.fsum(losses) / 2)]
    assert losses[0] != losses[1]


# ------------------------------------------------------------------ the table


def row(racks: int, seed: int, arm: str, loss: float) -> dict[str, Any]:
    return {
        "racks": racks, "seed": seed, "arm": arm, "loss": loss, "tokens": 1024, "wall_s": 1.0,
        "curve": [[256, loss + 1], [512, loss]], "plan": asdict(PLAN), "text_sha256": "ab" * 32,
    }  # fmt: skip


def rows(concurrent: tuple[float, ...]) -> list[dict[str, Any]]:
    """Three seeds; DiLoCo has 2.0, 2.1, 2.2."""
    found = []
    for seed, loss in enumerate((2.0, 2.1, 2.2), 1):
        found += [row(2, seed, "diloco", loss), row(2, seed, "data-parallel", loss / 1.25)]
        found += [row(2, seed, "mend-concurrent", loss * (1 + concurrent[seed - 1] / 100))]
    return found


def test_an_interval_of_known_numbers() -> None:
    found = quality_table.t_interval([1.0, 2.0, 3.0])
    half = 4.303 / math.sqrt(3)  # standard deviation 1, two degrees of freedom
    assert (found.mean, found.n) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert math.isnan(quality_table.t_interval([1.0]).high)
    with pytest.raises(UsageError, match="at most 13"):
        quality_table.t_interval([1.0] * 14)


def test_runs_are_paired_by_seed() -> None:
    """Seeds that differ by 10 % do not widen the interval of arms that differ by 0.3 % in each."""
    summary = {e["arm"]: e for e in quality_table.summarize(rows((0.3, 0.3, 0.3)))}
    above = summary["mend-concurrent"]["above_diloco_pct"]
    assert (above["low"], above["mean"], above["high"]) == pytest.approx((0.3, 0.3, 0.3))
    assert summary["diloco"]["above_data-parallel_pct"]["mean"] == pytest.approx(25)
    assert "above_diloco_pct" not in summary["diloco"]
    assert summary["diloco"]["loss"]["mean"] == pytest.approx(2.1)
    assert quality_table.paired_pct({1: 2.2, 3: 1.0}, {1: 2.0, 2: 1.0}) == pytest.approx([10])


@pytest.mark.parametrize(
    ("concurrent", "says"),
    [
        ((0.3, 0.31, 0.29), "met"),
        ((-2.0, -2.1, -2.2), "met"),
        ((0.1, 0.3, 0.9), "mean within, the interval is not"),
        ((0.6, 0.61, 0.62), "missed"),
    ],
)
def test_the_verdict_is_that_of_the_whole_interval(
    concurrent: tuple[float, ...], says: str
) -> None:
    (line,) = quality_table.verdicts(quality_table.summarize(rows(concurrent)))
    assert line.endswith(f"**{says}**"), line


def test_one_seed_bounds_nothing_and_says_so() -> None:
    (line,) = quality_table.verdicts(quality_table.summarize(rows((0.1, 0, 0))[:3]))
    assert "no interval" in line


def test_later_of_two_runs_of_a_cell_counts() -> None:
    found = quality_table.newest([row(2, 1, "diloco", 2.0), row(2, 1, "diloco", 3.0)])
    assert found[2, "diloco"][1]["loss"] == 3.0


def test_curves_are_means_over_seeds_with_their_range() -> None:
    (first, last) = quality_table.curves(rows((0, 0, 0)), 2, "diloco")
    assert first == pytest.approx((256, 3.1, 3.0, 3.2))
    assert last == pytest.approx((512, 2.1, 2.0, 2.2))


def test_table_and_plots_are_the_same_bytes_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    machine = {"python": "3", "torch": "2", "system": "Linux"}
    kept = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        one_seed = [*rows((0.3, 0.3, 0.3)), row(4, 1, "diloco", 2.0), row(4, 1, "alone", 2.5)]
        paths = quality_table.write(one_seed, folder, "the command", machine)
        kept.append([path.read_bytes() for path in paths[:3]])
    assert kept[0] == kept[1]
    found = json.loads(kept[0][0])
    assert [e["arm"] for e in found["summary"] if e["racks"] == 4] == ["alone", "diloco"]
    assert found["summary"][-1]["loss"]["low"] is None
    page = kept[0][1].decode()
    assert "+0.30 [+0.30, +0.30]" in page
    assert "\nthe command\n" in page
    assert paths[3].read_bytes().startswith(b"\x89PNG")


def test_no_runs_no_table() -> None:
    with pytest.raises(UsageError, match="there are no runs yet"):
        quality_table.summarize([])


# ------------------------------------------------------------------ resuming


def test_a_torn_last_line_is_run_again(tmp_path: Path) -> None:
    kept = tmp_path / "quality.jsonl"
    assert quality.read(kept) == []
    kept.write_text(json.dumps(row(2, 1, "diloco", 2.0)) + '\n{"racks": 2, "se')
    assert [found["arm"] for found in quality.read(kept)] == ["diloco"]
    quality.append(kept, row(2, 1, "alone", 2.0))
    assert [found["arm"] for found in quality.read(kept)] == ["diloco", "alone"]


def test_runs_that_do_not_compare_are_not_put_into_one_table() -> None:
    kept = [row(2, 1, "diloco", 2.0)]
    quality.check_same(kept, cell("alone"))
    with pytest.raises(UsageError, match="another plan"):
        quality.check_same(kept, replace(cell("alone"), plan=replace(PLAN, learning_rate=1e-3)))
    quality.check_text(kept, row(4, 1, "alone", 2.0) | {"text_sha256": "other"})
    with pytest.raises(UsageError, match="another text"):
        quality.check_text(kept, row(2, 1, "alone", 2.0) | {"text_sha256": "other"})


def test_options_select_the_cells_and_invalid_ones_are_refused() -> None:
    options = quality.parse_options(["--seeds", "2", "--racks", "4", "--arms", "diloco,page-long"])
    found = [c.key for c in quality.cells(PLAN, options)]
    assert found == [(4, s, arm) for s in (1, 2) for arm in ("diloco", "page-long")]
    only = quality.parse_options(["--seeds", "2-3", "--racks", "2", "--arms", "alone"])
    assert [c.seed for c in quality.cells(PLAN, only)] == [2, 3]
    assert len(quality.cells(PLAN, quality.parse_options([]))) == 2 * 3 * len(CORE)
    for wrong in (
        ["--arms", "dilco"],
        ["--racks", "1"],
        ["--racks", "two"],
        ["--seeds", "0"],
        ["--seeds", "3-2"],
    ):
        with pytest.raises(SystemExit):
            quality.parse_options(wrong)


def test_the_page_says_what_makes_its_runs() -> None:
    """By racks and seeds, as not all arms need to have the same."""
    found = [row(4, seed, "diloco", 2.0) for seed in (1, 2)]
    found += [row(2, 1, arm, 2.0) for arm in (*CORE, "page-long")]
    found.append(row(2, 2, "page-long", 2.0))
    for each in found:
        each["plan"] = asdict(quality.FULL)
    lines = quality.command(quality.parse_options(["--table"]), found).splitlines()
    assert lines == [
        "python -m benchmarks.quality --racks 2 --seeds 1",
        "python -m benchmarks.quality --racks 2 --seeds 2 --arms page-long",
        "python -m benchmarks.quality --racks 4 --seeds 2 --arms diloco",
    ]
    found[0]["plan"]["learning_rate"] = 1e-3
    assert "--learning-rate 0.001" in quality.command(quality.parse_options([]), found)
    assert "--quick" in quality.command(quality.parse_options(["--quick"]), found)


def test_a_plan_never_looks_between_two_merges() -> None:
    for wrong in ({"eval_steps": 6}, {"steps": 20}):
        with pytest.raises(AssertionError):
            replace(PLAN, **wrong)  # type: ignore[arg-type]
    assert isinstance(ARMS["alone"], Arm)
