"""`mend plan`: arithmetic by hand, the rule it recommends by, and that a job takes its answer."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mend.config import MendConfig
from mend.errors import ConfigError
from mend.tools import app, plan
from mend.tools.links_spec import Link
from mend.tools.plan import Asked, Choice, advice, base_config, choice_of, choices, recommended
from mend.tools.plan_command import exports, settings, start_of, toml

MESH = frozenset({"exchange_plan"})


def asked(
    params: int = 100_000_000,
    step_ms: float = 100.0,
    link: str = "1gbit,20ms",
    racks: int = 2,
    ranks: int = 1,
    **more: Any,
) -> Asked:
    return Asked(params, step_ms, Link.parse(link), racks, ranks, merge_ns=2.0, **more)


def one(
    question: Asked, period: int = 128, payload: str = "float32", fragments: int = 4, tau: int = 0
) -> Choice:
    return choice_of(question, base_config(question.racks), period, payload, fragments, tau)


def test_an_exchange_by_hand() -> None:
    """25M elements are 100 MB: 800 Mbit over 900 of 1000 Mbit/s, six round trips, 3 ns each."""
    row = one(asked())
    assert row.exchange.bytes == 100_000_000
    assert row.exchange.transfer_ms == pytest.approx(800 / 900 * 1000)
    assert row.exchange.trips_ms == pytest.approx(6 * 20)
    assert row.exchange.work_ms == pytest.approx(25 * (2 + 1))
    assert row.exchange.total_ms == pytest.approx(888.889 + 120 + 75, abs=0.01)
    # 1084 / 0.8 = 1355 ms are 13.6 steps
    assert row.config.tau == 14
    assert row.window_ms == 1400
    assert row.wait_ms == 0
    # a round every 32 steps of 100 ms
    assert row.gap_ms == 3200
    assert row.link_busy == pytest.approx(888.889 / 3200, abs=1e-5)
    # the whole model once in 128 steps, 400 MB in 12.8 s
    assert row.period_bytes == 400_000_000
    assert row.mbit == pytest.approx(250)
    assert row.copy_ms == pytest.approx(25 * 0.03)
    assert row.utilisation == pytest.approx(3200 / 3200.75)
    assert row.fits


def test_the_memory_of_a_gpu_that_encodes_by_hand() -> None:
    """Of 25M elements an anchor and a residual, and four and a half vectors of a quarter of them;
    no residual where the weights keep it; 0 where it cannot encode."""
    row = one(asked(ranks=4), payload="int4")
    assert row.device_bytes == 2.5 * 4 * 6_250_000
    assert row.encoding_bytes == 2 * 4 * 25_000_000 + 4.5 * 4 * 6_250_000
    assert one(asked(ranks=4, device="cpu"), payload="int4").encoding_bytes == 0
    kept = one(asked(ranks=4), payload="topk").encoding_bytes
    assert kept == 4 * 25_000_000 + 4.5 * 4 * 6_250_000
    assert one(asked(ranks=4), payload="sparse").encoding_bytes == 0


def test_racks_payload_ranks_and_delay_by_hand() -> None:
    """Each of four racks pulls three payloads of half the bytes; ranks share work, not the link."""
    question = asked(racks=4, ranks=5, delay_ms=500.0, device="cpu")
    base = dataclasses.replace(base_config(4), exchange_plan="mesh", named=MESH)
    row = choice_of(question, base, 128, "bfloat16", 4)
    assert row.exchange.bytes == 3 * 50_000_000
    assert row.exchange.transfer_ms == pytest.approx(1200 / 900 * 1000)
    assert row.exchange.work_ms == pytest.approx(25 * 3 / 5)
    assert row.exchange.delay_ms == 500
    assert row.copy_ms == pytest.approx(5 * 0.9)
    assert row.device_bytes == 0
    # 1968 / 0.8 = 2460 ms, less than the 32 steps between rounds: one is in flight, with a part of
    # each rack, two for the version it makes, one for the residual and one more; two versions of a
    # fifth of the model, each with its momentum
    assert row.config.tau == 25
    assert row.memory.anchors == 2 * 2 * 4 * 20_000_000
    assert row.memory.rounds == 1 * (4 + 4) * 4 * 5_000_000
    assert row.config.simulated_merge_delay_ms == 0, "the delay is the network's, not a setting"


def test_many_racks_merge_a_slice_each_where_that_is_quicker() -> None:
    """Of 25M elements each rack of eight pulls 7/8 of a payload (100 MB) and of the result; a mesh
    would be 700 MB. Two round trips more, which a tiny fragment is not worth."""
    row = one(asked(racks=8))
    assert row.config.sharded
    assert "exchange_plan" not in settings(row), "so it comes out by itself"
    assert row.exchange.bytes == 175_000_000
    assert row.exchange.trips_ms == pytest.approx(8 * 20)
    half = one(asked(racks=8), payload="bfloat16")
    assert half.exchange.bytes == 131_250_000, "the result is fp32"
    tiny = one(asked(params=10_000, racks=8))
    assert settings(tiny)["exchange_plan"] == "mesh"
    assert tiny.exchange.trips_ms == pytest.approx(6 * 20)
    for racks in (2, 3):
        assert "exchange_plan" not in settings(one(asked(racks=racks)))


def test_moments_are_a_part_of_the_bytes_and_of_the_memory() -> None:
    """400 MB each: first moments every third period of 128 steps, second ones every sixth."""
    question = asked()
    usual = one(question)
    more = {"momentum_sync_period_steps": 384, "second_moment_sync_period_steps": 768}
    base = dataclasses.replace(base_config(2), **more)
    row = choice_of(question, base, 128, "float32", 4)
    assert row.moment_bytes == pytest.approx(200_000_000, abs=1)
    assert row.period_bytes == usual.period_bytes + row.moment_bytes
    assert row.link_busy == pytest.approx(1.5 * usual.link_busy, rel=1e-4)
    assert row.memory.anchors == 2 * usual.memory.anchors, "as much as weights and outer momentum"
    assert row.memory.rounds == 3 * usual.memory.rounds
    assert {f"export MEND_{name.upper()}={k}" for name, k in more.items()} <= set(exports(row))
    tight = dataclasses.replace(base, momentum_sync_period_steps=12)
    assert choice_of(question, tight, 128, "float32", 4).config.tau == 11


def test_training_waits_for_what_the_overlap_does_not_hide() -> None:
    row = one(asked(), tau=3)
    assert row.wait_ms == pytest.approx(1083.889 - 300, abs=0.01)
    assert row.utilisation == pytest.approx(3200 / (3200 + 783.889 + 0.75), abs=1e-5)
    assert not row.fits


def test_a_link_that_is_too_slow_sets_the_pace_itself() -> None:
    """Overlap hides no transfers that are longer than the time between two of them."""
    row = one(asked(link="100mbit"), tau=127)
    assert row.link_busy == pytest.approx(8888.89 / 3200, abs=1e-4)
    assert row.wait_ms == pytest.approx(8888.89 - 3200, abs=0.01)
    assert not row.fits


def test_tau_is_the_least_that_hides_the_exchange_and_a_quarter_of_h_at_most() -> None:
    for row in choices(asked(link="200mbit,50ms"), base_config(2)):
        config, least = row.config, row.exchange.total_ms / 0.8
        assert 1 <= config.tau <= config.sync_period_steps // 4
        if config.tau < config.sync_period_steps // 4:
            assert (config.tau - 1) * 100 < least <= config.tau * 100 or config.tau == 1


def test_the_largest_tensor_is_in_one_piece() -> None:
    """tau has to hide the fragment that it fills alone; the link's load stays what it was."""
    row = one(asked(largest=50_000_000))
    # 200 MB, 1600 Mbit over 900; 3 ns for 50M
    assert row.longest.total_ms == pytest.approx(1777.778 + 120 + 150, abs=0.01)
    assert row.config.tau == 26  # 2048 / 0.8 = 2560 ms
    assert row.link_busy == one(asked()).link_busy
    assert row.fits
    short = one(asked(largest=50_000_000), tau=15)
    assert not short.fits
    assert short.wait_ms == pytest.approx((2047.778 - 1500) / 4, abs=0.01), "one round of four"
    assert one(asked(largest=20_000_000)).longest == one(asked()).exchange, "it fits into a quarter"


def test_more_fragments_only_where_they_shorten_a_long_overlap() -> None:
    quick = recommended(choices(asked(params=1_000_000), base_config(2)))
    assert (quick.config.fragments, quick.config.tau) == (4, 2)
    rows = choices(asked(codecs=("float32",)), base_config(2))
    slow = next(row for row in rows if row.config.sync_period_steps == 128)
    assert slow.config.fragments == 8
    assert slow.config.tau <= 8


@pytest.mark.parametrize("link", ["1gbit,20ms", "100mbit", "24.9mbit"])
def test_fitting_row_of_least_loss_is_recommended(link: str) -> None:
    """H 128 at +6/+1 was recommended beside a row of H 64 with int4 that fitted at +2/+0."""
    rows = choices(asked(link=link), base_config(2))
    chosen = recommended(rows)
    fitting = [row for row in rows if row.fits]
    assert chosen.fits
    assert chosen.loss.percent == min(row.loss.percent for row in fitting)
    equal = [row for row in fitting if row.loss.percent == chosen.loss.percent]

    def order(row: Choice) -> tuple[float, ...]:
        period, tau = row.config.sync_period_steps, row.config.tau
        return row.loss.known == "bound", period, tau, row.period_bytes

    assert chosen is min(equal, key=order), "of equal ones the one that waits and sends least"


def test_a_shorter_period_and_a_codec_are_compared_unasked() -> None:
    rows = choices(asked(), base_config(2))
    assert {16, 32, 64} <= {row.config.sync_period_steps for row in rows}
    assert {row.config.codec for row in rows} == {"float32", "bfloat16", "int8", "int4"}


def test_where_nothing_fits_it_says_what_would() -> None:
    question = asked(link="10mbit", params=100_000_000, codecs=plan.DTYPES)
    chosen = recommended(choices(question, base_config(2)))
    assert not chosen.fits
    assert (chosen.config.sync_period_steps, chosen.config.codec) == (1024, "bfloat16")
    told = list(advice(question, chosen))
    # 1600 Mbit in 1024 steps of 0.1 s are 15.625 Mbit/s, over 0.9 and 0.7
    assert "needs a link of 24.8 Mbit/s" in told[1]
    assert "H=2540" in told[1]
    relieved = recommended(choices(asked(link="24.9mbit", codecs=plan.DTYPES), base_config(2)))
    assert relieved.link_busy <= plan.BUSY_MAX


def test_a_link_with_room_whose_delay_is_longer_than_any_overlap() -> None:
    question = asked(params=1_000_000, step_ms=1.0, link="10gbit", delay_ms=5000.0)
    told = " ".join(advice(question, recommended(choices(question, base_config(2)))))
    assert "The link has room" in told
    assert "5000 of them round trips and delay" in told


def test_advice_names_the_loss_of_each_requested_codec_that_has_one() -> None:
    question = asked(codecs=("topk", "int4", "powersgd-8"))
    told = list(advice(question, recommended(choices(question, base_config(2)))))
    assert [line.split("'")[1] for line in told if "the loss by" in line] == ["topk", "powersgd-8"]


def test_loss_of_packets_and_the_start_are_told() -> None:
    question = asked(link="100mbit,20ms,1%", params=2_000_000_000, step_ms=5000)
    told = " ".join(advice(question, recommended(choices(question, base_config(2)))))
    assert "1 % loss is not predicted" in told
    assert "711 s to copy" in start_of(question)  # 64 Gbit over 90 Mbit/s


@pytest.mark.parametrize("racks", [2, 3, 8])
@pytest.mark.parametrize("link", ["10mbit,100ms", "400mbit,20ms", "100gbit"])
def test_every_row_is_a_configuration_that_a_job_takes(
    racks: int, link: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By environment and by TOML, without a warning."""
    for row in choices(asked(racks=racks, link=link), base_config(racks)):
        file = tmp_path / "mend.toml"
        file.write_text("\n".join(toml(row)))
        assert tomllib.loads(file.read_text())["mend"] == settings(row)
        with monkeypatch.context() as shell, warnings.catch_warnings():
            warnings.simplefilter("error")
            shell.setenv("MEND_CONFIG", str(file))
            assert MendConfig() == row.config
            shell.delenv("MEND_CONFIG")
            for line in exports(row):
                name, _, value = line.removeprefix("export ").partition("=")
                shell.setenv(name, value)
            assert MendConfig() == row.config


def test_other_settings_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum is a second vector beside each anchor."""
    usual = one(asked())
    monkeypatch.setenv("MEND_OUTER_OPTIMIZER_MOMENTUM", "0")
    assert 2 * one(asked()).memory.anchors == usual.memory.anchors
    monkeypatch.setenv("MEND_MERGE_MIN_RACKS", "3")
    with pytest.raises(ConfigError, match="merge_min_racks"):
        base_config(2)


ASK = ["plan", "--params", "100M", "--step-ms", "100", "--link", "1gbit,20ms", "--merge-ns", "2"]


def test_the_command_shows_settings_outcome_table_and_assumptions() -> None:
    answer = CliRunner().invoke(app, [*ASK, "--codecs", "float32"])
    assert answer.exit_code == 0, answer.output
    for part in (
        "export MEND_FRAGMENTS=8",
        "export MEND_OVERLAP_STEPS=8",
        'codec = "float32"',
        "444 ms for 50 MB, 120 ms for round trips",
        "busy 56% of the time, 500 Mbit/s on average",
        "1024  float32",
        "2.00 to merge (given)",
    ):
        assert part in answer.output, answer.output
    arrows = [line for line in answer.output.splitlines() if "->" in line]
    assert len(arrows) == 1
    assert "64  float32" in arrows[0]


def test_the_command_for_programs_and_when_nothing_fits() -> None:
    answer = CliRunner().invoke(app, [*ASK, "--json", "--codecs", "float32,bfloat16"])
    told = json.loads(answer.output)
    assert told["recommended"]["exchange_ms"] == pytest.approx(444.444 + 120 + 75, abs=0.01)
    assert len(told["rows"]) == 14
    assert told["assumed"]["round_trips"] == 6
    assert told["asked"]["link"] == "1gbit,20ms"
    assert "MEND_OVERLAP_STEPS=8" in " ".join(told["exports"])
    assert CliRunner().invoke(app, [*ASK, "--racks", "64", "--device", "cpu"]).exit_code == 0
    slower = [*ASK, "--racks", "64", "--device", "cpu", "--link", "10mbit"]
    answer = CliRunner().invoke(app, slower)
    assert answer.exit_code == 1
    assert "! No setting fits" in answer.output


def test_the_command_takes_the_largest_tensor() -> None:
    answer = CliRunner().invoke(app, [*ASK, "--largest-tensor", "20M", "--codecs", "float32"])
    assert "export MEND_OVERLAP_STEPS=12" in answer.output, answer.output  # 711 + 120 + 60 ms
    assert "with the largest tensor 891 ms" in answer.output
    assert "but for one tensor of 20M" in answer.output


def test_merging_can_be_measured_here() -> None:
    answer = CliRunner().invoke(app, [*ASK[:-2], "--measure", "--json"])
    told = json.loads(answer.output)["assumed"]
    assert told["merge_ns_is"] == "measured here"
    assert 0 < told["merge_ns"] < 1000


@pytest.mark.parametrize(
    ("name", "value"), [("--params", "many"), ("--link", "fast"), ("--params", "0")]
)
def test_invalid_plan_option_is_refused(name: str, value: str) -> None:
    answer = CliRunner().invoke(app, [*ASK, name, value])
    assert isinstance(answer.exception, ConfigError)
    assert name.strip("-") in str(answer.exception)


def test_a_tiny_model_has_figures_that_can_be_read() -> None:
    """Three parameters were "3e-06M", and their payload "3e-06 MB"."""
    command = ["plan", "--params", "3", "--step-ms", "100", "--link", "1gbit"]
    answer = CliRunner().invoke(app, [*command, "--largest-tensor", "2"])
    assert answer.output.startswith("3 parameters, ")
    assert "one tensor of 2" in answer.output
    assert "e-0" not in answer.output
