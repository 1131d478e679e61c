"""A launch over a real network of namespaces. Root only: nobody else may make them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mend.errors import LinkError
from mend.tools import links as links_module
from mend.tools import links_check
from mend.tools.launch import Job
from mend.tools.links import Link, links, remove_leftovers
from tests.process.racks import ROOT
from tests.process.test_launch import launched

NETNS = Path("/run/netns")

MISSING = [program for program in ("ip", "tc", "iperf3") if shutil.which(program) is None]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not Path("/dev/net/tun").exists() or MISSING,
    reason=f"needs root on Linux with /dev/net/tun, ip, tc and iperf3 (missing: {MISSING})",
)

HELD = """
import sys
from mend.tools import links
links.verify = lambda net: "not measured"
with links.links(links.Link.parse("100mbit"), racks=1) as net:
    print(*(site.namespace for site in net.sites), flush=True)
    sys.stdin.read()
"""


def namespaces() -> set[str]:
    return {path.name for path in NETNS.iterdir()} if NETNS.exists() else set()


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring a link is the first test's part."""
    monkeypatch.setattr(links_module, "verify", lambda net: "not measured")


def test_a_job_trains_over_a_link_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes every link slower than asked for, which is refused otherwise."""
    monkeypatch.setattr(links_check, "TOLERANCE", 1.0)
    monkeypatch.setattr(links_check, "RTT_SLACK_MS", 1000.0)
    before = namespaces()
    script = (str(ROOT / "examples" / "minimal.py"), "--steps", "60")
    job = Job(command=script, link="100mbit,10ms", torchrun=False)
    outcome, lines = launched(job)
    said = "\n".join(lines)
    assert outcome.status == 0, said
    figures = re.search(
        r"link=100mbit,10ms measured rtt=([\d.]+)ms rate=([\d.]+)/([\d.]+)mbit", said
    )
    assert figures, said
    rtt, there, back = map(float, figures.groups())
    assert rtt >= 10
    assert 0 < there <= 115
    assert 0 < back <= 115
    assert said.index("measured") < said.index("[launch] started")
    assert re.search(r"hello rack=1 address=tcp://10\.213\.0\.2:\d+", said), said
    digests = re.findall(r"digest=(\w+)", said)
    assert len(digests) == 2, said
    assert len(set(digests)) == 1
    assert namespaces() <= before, "a namespace was left behind"


@pytest.mark.usefixtures("unmeasured")
def test_a_link_is_gone_after_an_interrupt() -> None:
    made: set[str] = set()

    def interrupted() -> None:
        with links(Link.parse("100mbit"), racks=2) as net:
            made.update(site.namespace for site in net.sites)
            assert made <= namespaces()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(made) == 3
    assert not namespaces() & made


@pytest.mark.usefixtures("unmeasured")
def test_a_device_that_died_is_told() -> None:
    """Racks that fall silent for no reason of theirs would look like a fault of mend."""

    def device_killed() -> None:
        with links(Link.parse("100mbit"), racks=1) as net:
            hub = net.racks[0].namespace.replace("rack0", "hub")
            (device,) = subprocess.check_output(["ip", "netns", "pids", hub], text=True).split()
            os.kill(int(device), signal.SIGKILL)
            os.waitid(os.P_PID, int(device), os.WEXITED | os.WNOWAIT)

    with pytest.raises(LinkError, match="device died while it was in use"):
        device_killed()


def test_leftovers_of_a_killed_launch_are_removed_by_the_next() -> None:
    """Its device dies with it and takes the interfaces along; empty namespaces are left."""
    command = [sys.executable, "-c", HELD]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        made = holder.stdout.readline().split()
        show = ["ip", "-n", made[0], "-o", "link", "show"]
        assert "mend0" in subprocess.check_output(show, text=True)
        holder.kill()
    while "mend0" in subprocess.check_output(show, text=True):
        os.sched_yield()
    others = {name for name in namespaces() if not name.startswith("mend-")}
    assert set(made) <= set(remove_leftovers())
    assert not namespaces() & set(made)
    assert others <= namespaces()
