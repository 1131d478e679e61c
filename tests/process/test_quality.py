"""The quality harness with mend itself among its arms. tests/unit/test_quality.py has the others;
tests/process/test_twin.py and test_free.py hold mend to the reference in every run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import quality
from tests.process.racks import LIMIT_S, ROOT, Nursery


@pytest.mark.slow
def test_a_quick_table_with_mend_itself_and_again_from_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    nursery: Nursery,
) -> None:  # fmt: skip
    pytest.importorskip("matplotlib")
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    words = ["--quick", "--into", str(tmp_path), "--seeds", "1"]
    done = subprocess.run(
        [nursery.python, "-m", "benchmarks.quality", *words,
         "--arms", "diloco,mend-concurrent,page-concurrent,mend-default"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, text=True, timeout=LIMIT_S,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    diloco, mend, page, default = quality.read(tmp_path / "quality.jsonl")
    assert "arm=mend-concurrent" in done.stdout
    assert re.search(r"\*\*(within|missed)\b.*\*\*", done.stdout), "which depends on the text"
    assert diloco["tokens"] == mend["tokens"]
    assert [tokens for tokens, _ in diloco["curve"]] == [tokens for tokens, _ in mend["curve"]]
    assert mend["rounds"] >= 4 * 48 // 8
    assert mend["weights"] != diloco["weights"]
    assert mend["loss"] == pytest.approx(diloco["loss"], rel=0.02)
    assert default["tokens"] == mend["tokens"]
    assert default["loss"] == pytest.approx(diloco["loss"], rel=0.05)
    assert 4 <= default["rounds"] < mend["rounds"], "one period of 32 in 48 steps, and the end"
    assert page["loss"] == pytest.approx(mend["loss"], abs=1e-5), "two programs, two results"
    monkeypatch.setattr(sys, "argv", ["quality", *words, "--table"])
    quality.main()
    again = capsys.readouterr().out
    assert "arm=" not in again, "it was run again"
    assert again == done.stdout[done.stdout.index("# Quality") :]
