"""What every test starts from: no MEND_* of who runs it, the same Hypothesis examples for all."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import settings

from mend.config.sources import LAUNCH_PORTS
from mend.tools.ports import free_ports as picked
from tests import golden
from tests.gate import forks, machine
from tests.gate.plugin import Gate, Runner, Shard, starts_processes, worker
from tests.process.racks import Nursery

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, print_blob=True
)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background deaf to Ctrl-C, and so all that this starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

GIVEN: deque[int] = deque(maxlen=64)
"""The ports that were given last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", default="all",
        help="tests marked slow: all; auto: the shard of this commit; or a number (tests/gate)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Shard(config))
    if config.option.collectonly:
        return
    gate = Gate(config)
    config.pluginmanager.register(gate, "gate")
    config.pluginmanager.register(Runner(gate))
    if forks.wanted(config):
        config.pluginmanager.register(forks.Forks(config))


def pytest_xdist_auto_num_workers() -> int:
    return machine.workers()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there behind it stays: looking through it for rubbish, now or during the tests, takes
    seconds of each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # here, as the process that only hands tests to the workers needs none

    for each in [*logging.root.manager.loggerDict.values()]:
        if isinstance(each, logging.Logger) and not each.propagate:
            each.propagate = True  # else pytest gives 40 of torch its handlers, 6 times per test
    if torch.cuda.is_available():  # cuBLAS reads it when CUDA starts, which an early test may do
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    if worker() is not None:
        from tests import kernels

        kernels.load()
    for item in items:
        if starts_processes(item.nodeid):
            item.add_marker(pytest.mark.process)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """A setting of the shell, or an earlier test, must not decide a test."""
    golden.given.clear()
    for name in [name for name in os.environ if name.startswith("MEND_")]:
        monkeypatch.delenv(name)
    if ports := pytestconfig.pluginmanager.get_plugin("gate").ports:
        monkeypatch.setenv(LAUNCH_PORTS, ports)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Of torch: the workers of pytest share the cores, and threads that wait for each other took
    half of the time of long vectors. A test of threads sets a number of its own."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nursery(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Nursery]:
    """One for all tests of a worker."""
    made = forks.nursery(tmp_path_factory.mktemp("nursery"))
    gate = pytestconfig.pluginmanager.get_plugin("gate")
    gate.usage.append(made.usage)
    yield made
    with gate.end_of(made.usage):
        made.close()


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """Distinct TCP ports of the loopback interface that nobody holds right now."""

    def find(count: int) -> list[int]:
        # The launcher's own way, which stays clear of ephemeral ports. What was given to another
        # job of this test may not be listened on yet.
        while set(GIVEN).intersection(ports := picked(count)):
            pass
        GIVEN.extend(ports)
        return ports

    return find


@pytest.fixture
def free_port(free_ports: Callable[[int], list[int]]) -> int:
    return free_ports(1)[0]
