"""A job writes its events, `mend report` draws them, and a browser shows the page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.racks import LIMIT_S, ROOT, Nursery, environment

pytestmark = pytest.mark.process

STEPS = 60
WIDTHS = (1400, 390)
SCRIPT = f"""
import torch
from torch import nn
import mend

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
config = mend.MendConfig(sync_period_steps=8, overlap_steps=2, fragments=2, lockstep=True)
with mend.session(model, config, optimizer) as runtime:
    chance = torch.Generator().manual_seed(runtime.status().rack)
    for step in range({STEPS}):
        x = torch.randn(16, 32, generator=chance)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        runtime.count_tokens(16)
        optimizer.step()
        runtime.record(loss=loss.item())
"""


def mend(
    *arguments: str, python: str = sys.executable, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "mend.tools", *arguments], cwd=ROOT, env=environment(**more),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of two racks."""
    folder = tmp_path_factory.mktemp("job")
    script, events = folder / "train.py", folder / "events"
    script.write_text(SCRIPT)
    launch = ("launch", "--racks", "2", str(script))
    done = mend(*launch, python=nursery.python, MEND_DIAGNOSTICS_DIR=str(events))
    assert done.returncode == 0, done.stdout + done.stderr
    return events


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    done = mend("report", str(run))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout == f"{run / 'report.html'}\n"
    return run / "report.html"


def events(run: Path, rack: int, kind: str) -> list[dict[str, Any]]:
    path = run / f"events-rack{rack}-rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_every_rank_says_how_far_it_has_come(run: Path) -> None:
    for rack in (0, 1):
        progress, recorded = events(run, rack, "progress"), events(run, rack, "recorded")
        assert (progress[0]["step"], progress[0]["tokens"]) == (1, 16)
        assert (progress[-1]["step"], progress[-1]["tokens"]) == (STEPS, 16 * STEPS)
        assert [each.get("last", False) for each in progress].count(True) == 1
        assert progress[-1]["last"] is True
        assert progress[-1]["bytes_sent"] > 0
        times = [each["at_ns"] for each in progress]
        assert times == sorted(times)
        assert [each["step"] for each in recorded] == list(range(1, STEPS + 1))
        assert all(each["tokens"] == 16 * each["step"] for each in recorded)
        assert recorded[-1]["at_ns"] == progress[-1]["at_ns"]


def test_the_page_says_what_happened(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    said = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    rounds = len(events(page.parent, 0, "commit"))
    assert f"All digests equal yes, in {rounds} rounds" in said
    assert "Work merged 100.0% of every rack" in said
    assert "Ended in order yes" in said
    assert "The last 12 rounds" in said
    for phase in ("capture", "encode", "exchange", "merge", "apply"):
        assert re.search(rf"{phase} [\d.,]+ / [\d.,]+ / [\d.,]+ [\d.,]+ / ", said), phase
    assert "sync_period_steps" in said
    assert "127.0.0.1" not in text, "addresses are nobody's business"
    assert re.search(r"[\d.,]+ times (less|more) than an fp32 all-reduce of every step", said)


def browser() -> str:
    """A Chromium that is installed; none is downloaded."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    for found in map(shutil.which, names):
        if found:
            return found
    cache = Path.home() / ".cache" / "ms-playwright"
    for path in sorted(cache.glob("chromium*/chrome*/*")):
        if path.name in ("chrome", "chrome-headless-shell", "headless_shell"):
            return str(path)
    pytest.skip("no Chromium is installed")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_browser_shows_it_at_both_widths_without_fault(
    page: Path, tmp_path: Path, dark: bool
) -> None:
    """Nothing cut, nothing over its edge, contrast, names, hover values: look_at_page.js."""
    text = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe width="{each}" height="900" srcdoc="{text}"></iframe>'
                     for each in WIDTHS)  # fmt: skip
    script = Path(__file__).with_name("look_at_page.js").read_text(encoding="utf-8")
    looking = tmp_path / "looking.html"
    looking.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre>{frames}'
        f"<script>{script}</script>",
        encoding="utf-8",
    )
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", looking.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert told.keys() == {str(width) for width in WIDTHS}
    for width, seen in told.items():
        assert not seen["wrong"], "\n".join([width, *seen["wrong"]])
        assert seen["dark"] is dark
        assert seen["scrolls"] is (int(width) < 900), "the timeline has its own scroll bar"
        assert seen["lines"] >= 4


def test_a_folder_without_a_run_is_a_mistake_with_a_remedy(tmp_path: Path) -> None:
    done = mend("report", str(tmp_path))
    assert done.returncode == 2
    assert "there is no events-rack*-rank*.jsonl in there" in done.stderr
    assert "Traceback" not in done.stderr
