"""What every test starts from: no MEND_* of who runs it, the same Hypothesis examples for all."""

from __future__ import annotations

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mend.config.sources import LAUNCH_PORTS
from mend.tools.ports import free_ports as picked
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

PROCESS_TESTS = Path(__file__).parent / "process"


def worker() -> int | None:
    """The number of this worker of pytest-xdist; None: there is but one process."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    return int(name[2:]) if name.startswith("gw") else None


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

    if torch.cuda.is_available():  # cuBLAS reads it when CUDA starts, which an early test may do
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    if worker() is not None and not all(PROCESS_TESTS in item.path.parents for item in items):
        from tests import kernels

        kernels.load()
    for item in items:
        if PROCESS_TESTS in item.path.parents:
            item.add_marker(pytest.mark.process)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of the shell must not decide a test."""
    for name in [name for name in os.environ if name.startswith("MEND_")]:
        monkeypatch.delenv(name)
    if (number := worker()) is not None:  # ports that no worker of a run beside this one picks
        first = 20_000 + 2_000 * ((number + int(os.environ.get("WORKERS_BEFORE", "0"))) % 5)
        monkeypatch.setenv(LAUNCH_PORTS, f"{first}-{first + 1_999}")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Of torch: the workers of pytest share the cores, and threads that wait for each other took
    half of the time of long vectors. A test of threads sets a number of its own."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """One for all tests of a worker."""
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
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
