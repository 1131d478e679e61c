"""A small test suite that runs under the gate's plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
from pathlib import Path
import pytest
from tests.gate import record
from tests.gate.plugin import Gate, Runner, Shard

record.RUNS = Path(__file__).parent / "runs"

def pytest_addoption(parser):
    parser.addoption("--shard", default="auto")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow")
    config.option.shard = "0"
    config.pluginmanager.register(Shard(config))
    gate = Gate(config)
    config.pluginmanager.register(gate, "gate")
    config.pluginmanager.register(Runner(gate))

@pytest.fixture
def late(request):
    \"\"\"Stop the sentinel for so long that the test looks delayed.\"\"\"
    import os, signal, time
    gate = request.config.pluginmanager.get_plugin("gate")
    os.kill(gate.sentinel._process.pid, signal.SIGSTOP)
    while gate.sentinel.delay_ms() <= 300:
        time.sleep(0.01)
    yield
    os.kill(gate.sentinel._process.pid, signal.SIGCONT)

TRIES = {}

@pytest.fixture(scope="module")
def tries():
    return TRIES
"""


class Suite:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "conftest.py").write_text(CONFTEST)

    def run(self, text: str, *arguments: str) -> tuple[int, str]:
        (self.folder / "test_it.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        command.append(f"--basetemp={self.folder}/t")  # short: sockets have 107 characters
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        # Tokens of its own: those of the machine are held by the tests around this one.
        env |= {
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TMPDIR": str(self.folder),
        }
        env.pop("GATE_RUN", None)
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def tests(self) -> list[dict[str, object]]:
        (*_, newest) = sorted((self.folder / "runs").glob("2*/tests.jsonl"))
        return [json.loads(line) for line in newest.read_text().splitlines()]
