"""The page: one file that needs no other, safe whatever the files hold, the same every time."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from mend.errors import ConfigError
from mend.events.kinds import FRAGMENTS_MAX
from mend.tools import app, main
from mend.tools.report.draw import svg_of
from mend.tools.report.page import page as page_of
from mend.tools.report.panels import rate_of, recorded_panels, time_scale
from mend.tools.report.read import read_run
from mend.tools.report.run import NAME, report
from mend.tools.report.summary import Verdict, total, verdicts
from tests.noted import filled

S = 1_000_000_000
BEGIN = 1_800_000_000 * S
EVIL = '<script>alert(1)</script> & "quoted" $x^2$ \N{SNOWMAN}\x00'


class RunFolder:
    """Events of two racks that train `steps` steps of 10 ms, with a round every tenth."""

    def __init__(self, folder: Path, *, loss: str | None = "loss", job: str = "night") -> None:
        self.folder, self.job = folder, job
        self.lines: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        self.loss = loss

    def says(self, rack: int, kind: str, time_ns: int, /, **fields: Any) -> None:
        self.lines[rack].append(filled({"kind": kind, "time_ns": time_ns, **fields}))

    def trains(self, steps: int = 120) -> RunFolder:
        for rack in (0, 1):
            self.says(rack, "start", BEGIN, member=[rack, 1], plan="p", job=self.job)
            for step in range(1, steps + 1):
                self._step(rack, step, last=step == steps)
        return self

    def _step(self, rack: int, step: int, *, last: bool) -> None:
        at_ns = BEGIN + step * S // 10
        if step == 1 or step % 10 == 0:
            stall = step * (1 + rack) / 4
            counted = {
                "stall_ms_total": stall,
                "bytes_sent": 99 * step,
                "bytes_received": 98 * step,
            }
            more = {"last": True} if last else {}
            both = {"step": step, "tokens": 64 * step, "at_ns": at_ns}
            self.says(rack, "progress", at_ns, **both, **counted, **more)
        if self.loss is not None:
            values = {self.loss: 3.0 - step / 100 + rack / 10}
            said = {"step": step, "tokens": 64 * step, "at_ns": at_ns, "values": values}
            self.says(rack, "recorded", at_ns, **said)
        if step % 10 == 0:
            number = step // 10
            self.says(rack, "captured", at_ns - S // 50, fragment=0, seq=number, step=step)
            members = [
                {
                    "rack": r,
                    "seq": number,
                    "base": 0,
                    "capture_step": step,
                    "tokens": 640,
                    "steps": 10,
                }
                for r in (0, 1)
            ]
            kept = members if number % 3 else members[:1]
            reason = "all-in" if number % 3 else "grace-over, without rack 1"
            digests = [f"{number:02x}" * 32]
            about = {"fragment": 0, "version": number, "digests": digests, "reason": reason}
            ramp = {"rounds": number - 1, "momentum": (number - 1) / (number + 9)}
            self.says(rack, "commit", at_ns, members=kept, live=2, **about, **ramp)

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for rack, lines in self.lines.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.folder / f"events-rack{rack}-rank0.jsonl").write_text(text)
        return self.folder


def drawn(folder: Path) -> str:
    return report(folder).read_text(encoding="utf-8")


def answers(folder: Path) -> dict[str, Verdict]:
    """The verdicts of a run, without drawing it."""
    facts = read_run(folder)
    found = verdicts(facts, {rack: total(facts, rack) for rack in facts.racks})
    return {each.question: each for each in found}


def plain(page: str) -> str:
    """What is read, without tags and style."""
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RunFolder(tmp_path_factory.mktemp("run")).trains().write()


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return drawn(folder)


def test_it_says_what_the_run_came_to(page: str) -> None:
    said = plain(page)
    assert "job night , 2 racks, 120 steps and 15.4 k tokens in 11.9 s" in said
    assert "All digests equal yes, in 12 rounds" in said
    assert "Ended in order yes" in said
    assert "0 120 7.68 k 640 0.3% 12 of 12 100.0%" in said
    assert "1 120 7.68 k 640 0.5% 8 of 12 66.7%" in said
    assert "Work merged at least 66.7%" in said
    assert "None: no warning, no fault." in said
    assert "grace-over, without rack 1" in said
    assert "Outer momentum 0.52 after 11 rounds" in said
    for title in ("Loss against tokens", "Loss against time", "Throughput", "Stall", "Traffic",
                  "Why rounds closed", "Participation"):  # fmt: skip
        assert title in said, title


def test_it_needs_nothing_from_anywhere(page: str) -> None:
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?:|//[a-z]", without_names)
    assert not re.search(r"<(script|link|img|iframe|object)\b", page)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert len(page) < 3_000_000


def test_its_pictures_are_whole_and_their_parts_have_names_of_their_own(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 8
    ids = []
    for each in pictures:
        tree = ElementTree.fromstring(each)
        own = [found for part in tree.iter() if (found := part.get("id"))]
        used = re.findall(r'(?:url\(#|href="#)([^)"]+)', each)
        assert set(used) <= set(own)
        ids += own
    assert len(ids) == len(set(ids))


def test_the_same_run_gives_the_same_bytes(folder: Path, page: str) -> None:
    assert drawn(folder) == page


def test_what_files_hold_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, loss=EVIL, job=EVIL).trains(30)
    run.says(0, "fault", BEGIN + S, detail=EVIL, **{EVIL: EVIL})
    run.says(0, "commit", BEGIN + 9 * S, fragment=1, version=1, members=[], digests=[EVIL],
             reason=EVIL)  # fmt: skip
    page = drawn(run.write())
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x00" not in page
    assert page.count("<svg") == page.count("</svg>")


def test_a_run_without_losses_says_how_to_get_them(tmp_path: Path) -> None:
    facts = read_run(RunFolder(tmp_path, loss=None).trains(30).write())
    assert [panel.name for panel in recorded_panels(facts)] == ["loss-tokens", "loss-time"]
    for panel in recorded_panels(facts):
        assert "runtime.record(loss=loss.item())" in panel.empty
        assert panel.title in svg_of(panel, "x-")


def test_throughput_is_what_the_events_say_to_the_token(tmp_path: Path) -> None:
    facts = read_run(RunFolder(tmp_path).trains().write())
    at_s, rate = rate_of(facts, 0, lambda point: point.tokens)
    assert rate == pytest.approx([640.0] * len(rate))
    assert 0 < at_s[0] < at_s[-1] < 12
    nobody = rate_of(facts, 7, lambda point: point.tokens)
    assert [len(column) for column in nobody] == [0, 0]


@pytest.mark.parametrize(("seconds", "unit"), [(1, "s"), (301, "min"), (17_000, "min"), (1e6, "h")])
def test_a_time_axis_has_a_unit_that_fits(seconds: float, unit: str) -> None:
    assert time_scale(seconds)[1] == unit


def test_differing_digests_are_a_verdict(tmp_path: Path) -> None:
    run = RunFolder(tmp_path).trains(30)
    next(e for e in run.lines[1] if e["kind"] == "commit")["digests"] = ["0bad"]
    found = answers(run.write())["All digests equal"]
    assert found.fine is False
    assert found.answer.startswith("NO: fragment 0 version 1: rack 1 rank 0 has other digests")


def test_rounds_without_a_live_rack_are_a_verdict(tmp_path: Path) -> None:
    run = RunFolder(tmp_path).trains(120)
    found = answers(run.write())["Racks in a round"]
    assert found == Verdict("Racks in a round", "4 of 12 rounds merged 1 of 2 live racks", True)
    for lines in run.lines.values():
        for event in lines:
            if event["kind"] == "commit":
                event["members"] = event["members"][:1]
    found = answers(run.write())["Racks in a round"]
    assert found == Verdict("Racks in a round", "12 of 12 rounds merged 1 of 2 live racks", None)
    for lines in run.lines.values():
        for event in lines:
            event.pop("live", None)
    assert "Racks in a round" not in answers(run.write()), "an older file does not say who lived"


def test_a_run_that_is_killed_or_still_runs_is_read_all_the_same(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).trains(50).write()
    path = folder / "events-rack1-rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-900])
    found = answers(folder)["Ended in order"]
    assert (found.fine, found.answer) == (False, "no: rack 1 stopped, or still trains")


def test_a_run_of_a_single_event_is_a_page_too(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.says(0, "start", BEGIN, job="x")
    said = plain(drawn(run.write()))
    assert "No round was decided." in said
    assert "There are no two progress events" in said


def test_a_run_without_exchange_has_no_empty_figures_of_rounds(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for rack in (0, 1):
        run.says(rack, "start", BEGIN, job="alone", exchange=False)
        run._step(rack, 1, last=False)
        run._step(rack, 5, last=False)
    said = plain(drawn(run.write()))
    assert "No exchange (exchange=False)" in said
    assert "Participation" not in said
    assert "All digests equal" not in said


def test_several_runs_are_compared_first(tmp_path: Path) -> None:
    for name in ("blocking", "free <b>"):
        RunFolder(tmp_path / name / "events").trains(30).write()
    page = drawn(tmp_path)
    assert (tmp_path / NAME).exists()
    said = plain(page)
    assert "blocking 2 30 1.28 k 0.5% 3 20 ms" in said
    assert page.count("<section") == 2
    assert "free &lt;b&gt;" in page
    assert "free <b>" not in page
    assert set(re.findall(r'href="#(run\d)"', page)) == {"run0", "run1"}


def test_very_many_fragments_and_racks_stay_readable(tmp_path: Path) -> None:
    run = RunFolder(tmp_path).trains(10)
    for fragment in range(0, FRAGMENTS_MAX, 8):
        share = {"seq": 1, "base": 0, "capture_step": 1, "tokens": 1, "steps": 1}
        members = [{"rack": rack, **share} for rack in range(40)]
        about = {"fragment": fragment, "version": 1, "members": members, "reason": "all-in"}
        run.says(0, "commit", BEGIN + 2 * S, digests=["ab"] * 64, **about)
    page = drawn(run.write())
    assert "more fragments" in plain(page)
    assert len(page) < 3_000_000


def test_the_command_prints_the_path_of_the_page(tmp_path: Path) -> None:
    folder, out = RunFolder(tmp_path / "run").trains(20).write(), tmp_path / "x" / "page.html"
    answer = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    assert answer.output.split() == [str(out)]
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_mistakes_are_named_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mend", "report", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.says(0, "start", BEGIN, job="x")
    folder = run.write()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        report(folder, tmp_path / "file" / "page.html")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[report\]' in a checkout"):
        report(tmp_path)


def test_without_jinja_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[report\]' in a checkout"):
        page_of("title", [], [])
