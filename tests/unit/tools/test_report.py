"""The page: one file that needs no other, safe whatever the files hold, the same every time."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from mend.errors import ConfigError
from mend.events.kinds import FRAGMENTS_MAX
from mend.tools import app, main
from mend.tools.report.charts import rate_of
from mend.tools.report.read import read_run
from mend.tools.report.run import NAME, report
from mend.tools.report.summary import Verdict, alone_of, headline, total, verdicts
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
                    "rack": r, "seq": number, "base": 0, "capture_step": step, "tokens": 640,
                    "steps": 10,
                }
                for r in (0, 1)
            ]  # fmt: skip
            kept = members if number % 3 else members[:1]
            reason = "all-in" if number % 3 else "grace-over, without rack 1"
            closed_by = "all-in" if number % 3 else "grace-over"
            digests = [f"{number:02x}" * 32]
            about = {"fragment": 0, "version": number, "digests": digests}
            ramp = {"rounds": number - 1, "momentum": (number - 1) / (number + 9)}
            closing = {"reason": reason, "closed_by": closed_by}
            self.says(rack, "commit", at_ns, members=kept, live=2, **about, **closing, **ramp)

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


def test_report_summarizes_the_run(page: str) -> None:
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
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles == ["Loss", "Throughput", "Stall", "Traffic", "Why rounds closed",
                      "Participation", "Did merging help?", "Racks", "Warnings and faults",
                      "Digests"]  # fmt: skip
    assert not page.count("…"), "something was cut"


def test_report_page_loads_nothing_from_elsewhere(page: str) -> None:
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?:|//[a-z]", without_names)
    assert not re.search(r"<(script|link|img|iframe|object)\b", page)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert len(page) < 3_000_000


def test_every_picture_has_lines(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 4
    for each in pictures:
        lines = [part for part in ElementTree.fromstring(each) if part.tag == "path"]
        assert [line.get("class") for line in lines if line.get("class") in ("c0", "c1")]
        assert all("L" in line.get("d", "") for line in lines)


def test_the_same_run_gives_the_same_bytes(folder: Path, page: str) -> None:
    assert drawn(folder) == page


def test_markup_in_event_files_is_escaped_in_the_page(tmp_path: Path) -> None:
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
    page = drawn(RunFolder(tmp_path, loss=None).trains(30).write())
    assert "No loss was recorded: call runtime.record(loss=loss.item())" in plain(page)
    assert "<h3>Throughput</h3>" in page
    assert "<h3>Loss</h3>" not in page, "an empty panel"


def test_throughput_is_what_the_events_say_to_the_token(tmp_path: Path) -> None:
    facts = read_run(RunFolder(tmp_path).trains().write())
    edges = np.array([0.0, 2.0, 7.5, 11.0, 20.0, 30.0])  # the run has 11.9 s
    rate = rate_of(facts, 0, lambda point: point.tokens, edges)
    assert rate[:3] == pytest.approx([640.0] * 3)
    assert np.isnan(rate[3:]).all(), "most of these stretches is not known"
    assert np.isnan(rate_of(facts, 7, lambda point: point.tokens, edges)).all(), "no such rack"


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


def test_a_rack_that_left_by_an_exception_did_not_end_in_order(tmp_path: Path) -> None:
    run = RunFolder(tmp_path).trains(50)
    about = {"detail": "KeyboardInterrupt", "step": 50, "tokens": 50, "tokens_merged": 5.0}
    run.says(0, "ended-unmerged", BEGIN + 99 * S, outcome="kept-local", **about)
    run.says(1, "ended-unmerged", BEGIN + 99 * S, outcome="aborted", **about)
    found = answers(run.write())["Ended in order"]
    assert (found.fine, found.answer) == (False, "no: rack 1 ended aborted")
    assert "aborted" in plain(drawn(run.write())).split("Racks", 1)[1]


def test_a_run_of_a_single_event_is_a_page_too(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.says(0, "start", BEGIN, job="x")
    said = plain(drawn(run.write()))
    assert "No round was decided." in said
    assert "Throughput" not in said


@pytest.mark.parametrize(
    ("data", "said"), [("", "has no event"), ("rubbish\n", "can make no event: 1;")]
)
def test_a_run_without_events_is_no_page(tmp_path: Path, data: str, said: str) -> None:
    (tmp_path / "events-rack0-rank0.jsonl").write_text(data)
    with pytest.raises(ConfigError, match=said):
        report(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_rack_or_run_without_events_is_told_beside_the_others(tmp_path: Path) -> None:
    whole = RunFolder(tmp_path / "whole").trains(10).write()
    (whole / "events-rack1-rank0.jsonl").write_text("")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "events-rack0-rank0.jsonl").write_text("")
    page = plain(drawn(tmp_path))
    assert "events-rack1-rank0.jsonl has no event" in page
    assert "none has no event, and is left out" in page


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


def test_a_device_or_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, `--out /dev/null` made a file of the device."""
    folder, pipe, link = (
        RunFolder(tmp_path / "run").trains(20).write(),
        tmp_path / "p",
        tmp_path / "l",
    )
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
    report(folder, pipe)
    assert os.read(reader, 1 << 20).startswith(b"<!DOCTYPE html>")
    os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to("page.html")
    report(folder, link)
    assert link.is_symlink()
    assert (tmp_path / "page.html").read_bytes() == link.read_bytes()


# ------------------------------------------------------------------ the headline


def test_a_run_is_compared_with_the_one_without_exchange(tmp_path: Path) -> None:
    merged = RunFolder(tmp_path / "merged").trains()
    merged.lines[0][0]["elements"] = 1000
    alone = RunFolder(tmp_path / "alone").trains()
    for rack, lines in alone.lines.items():
        alone.lines[rack] = [each for each in lines if each["kind"] in ("start", "progress")]
        alone.lines[rack][0]["exchange"] = False
    for rack in (0, 1):
        for step in range(1, 121):
            values = {"loss": 4.0}
            at = {"step": step, "tokens": 64 * step, "at_ns": BEGIN + step * S // 10}
            alone.says(rack, "recorded", at["at_ns"], **at, values=values)
    said = plain(drawn(Path(merged.write(), "..").resolve())) if alone.write() else ""
    # 3.05 on average minus 1.145 in the last tenth; 2 x 4 bytes x 1000 elements x 120 steps.
    assert "Loss 1.9050 -52.4% against 4.0000 without exchange, at equal steps" in said
    assert "Tokens per second 1.28 k 100.0% of the 1.28 k tokens/s without exchange" in said
    assert "Sent 23.8 kB 40.4 times less than an fp32 all-reduce of every step: 960 kB" in said


def test_losses_at_other_steps_are_not_compared(tmp_path: Path) -> None:
    facts = read_run(RunFolder(tmp_path / "merged").trains(60).write())
    other = read_run(RunFolder(tmp_path / "alone").trains(120).write())
    other.exchange = False
    totals, more = ({rack: total(each, rack) for rack in (0, 1)} for each in (facts, other))
    alone = alone_of([("merged", facts, totals), ("alone", other, more)])
    assert alone is not None
    assert (alone.name, alone.steps) == ("alone", 120)
    loss, speed, sent = headline(facts, totals, alone)
    assert loss.more == "mean of the last tenth, as recorded"
    assert speed.more == "100.0% of the 1.28 k tokens/s without exchange"
    assert sent.more.endswith("B/s, all racks"), "an older file does not say how many elements"


# ------------------------------------------------------------------ for every eye


class Outline(HTMLParser):
    """The elements of a page: (tag, attributes), and tags that were not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.torn: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.torn.append(tag)


def test_readers_who_hear_the_page_get_names_and_order(page: str) -> None:
    found = Outline(page)
    assert not found.torn
    assert ("html", {"lang": "en"}) in found.elements
    for tag, about in found.elements:
        if about.get("role") in ("img", "region"):
            assert about["aria-label"], tag
        if tag == "th":
            assert about["scope"] == "col"
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels)), levels
    labels = [about["aria-label"] for _, about in found.elements if about.get("role") == "img"]
    assert labels[0] == (
        "Loss. At first: rack 0 2.985, rack 1 3.085. At last: rack 0 1.805, rack 1 1.905."
    )
    assert labels[4] == "rack 0 was merged in 12 of 12 rounds"


def luminance(colour: str) -> float:
    """Of WCAG 2, 0..1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_both_schemes_have_contrast(page: str) -> None:
    schemes = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))

        def contrast(one: str, other: str, of: dict[str, str] = colours) -> float:
            high, low = sorted((luminance(of[one]), luminance(of[other])), reverse=True)
            return (high + 0.05) / (low + 0.05)

        for text in ("text", "soft", "link"):
            for behind in ("page", "card", "bad-card", "note-card"):
                assert contrast(text, behind) >= 4.5, (text, behind)
        assert contrast("tip-text", "tip") >= 7
        grounds = {"page", "card", "bad-card", "note-card", "line", "tip", "tip-text"}
        for mark in colours.keys() - grounds:
            assert contrast(mark, "card") >= 3, mark


def test_text_is_shown_whole(tmp_path: Path) -> None:
    run = RunFolder(tmp_path).trains(30)
    long = " ".join(f"word{number}" for number in range(400))
    run.says(0, "fault", BEGIN + S, detail=long)
    page = drawn(run.write())
    assert long in page
    assert "grace-over: enough offers were in, and the grace window ended." in plain(page)
    assert "all-in: every live rack was in" in plain(page)
    assert "lockstep:" not in plain(page), "no round closed so"
