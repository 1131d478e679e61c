"""One port for the lane and the sideband of a leader, with real sockets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mend.config import MendConfig
from mend.config.wiring import settings_of
from mend.coordination.messages import Message
from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.errors import ConfigError, MendError, OtherJob, OtherVersion
from mend.status.event_log import EventLog
from mend.tools.keys_command import create
from mend.transport.bulk_wire import lane_token
from mend.types import SECOND, Address, Member, Peer, offer_key
from tests.unit.coordination.nouns import hello

JOB, SECRET = "run7", b"1" * 32
KEY = offer_key(Member(0, 5), 0, 0, 1)
LIMIT_S = 60.0


class Ear:
    """The machines of a process, which hear one message."""

    def __init__(self) -> None:
        self.heard_one = threading.Event()
        self.said: tuple[Peer, Message] | None = None

    def heard(self, peer: Peer, _: int, body: Message) -> None:
        self.said = peer, body
        self.heard_one.set()

    def tick(self) -> None: ...

    def deadline_ns(self) -> int | None:
        return None

    def crashed(self, error: MendError) -> None:
        raise error

    def foreign(self, found: OtherVersion | OtherJob) -> None: ...


@contextlib.contextmanager
def io_loop(me: Peer, bind: str, ports: tuple[int, int] | None) -> Iterator[tuple[IoLoop, Ear]]:
    recorder = EventLog({"rack": me.rack, "rank": me.rank}, None)
    options = IoLoopOptions(
        bind, "127.0.0.1", "", ports, 5 * SECOND, secrets=(SECRET,), protection="keys"
    )
    made, ear = IoLoop(me, Member(me.rack, 5), JOB, options, recorder), Ear()
    try:
        made.attach(ear)
        yield made, ear
    finally:
        made.close()
        recorder.close()


def test_leader_with_one_port_is_heard_and_pulled_from_there(free_port: int) -> None:
    address = f"tcp://127.0.0.1:{free_port}"
    with (
        io_loop(Peer(0, 0), address, (free_port, free_port)) as (leader, ear),
        io_loop(Peer(1, 0), "tcp://127.0.0.1:0", None) as (other, _),
    ):
        assert leader.address == address
        assert leader.lane_address == Address("127.0.0.1", free_port)
        leader.serve(KEY, memoryview(b"payload"))
        body = hello(1)
        other.call(lambda: other.connect(Peer(0, 0), address))
        other.call(lambda: other.send(Peer(0, 0), body))
        assert ear.heard_one.wait(LIMIT_S)
        assert ear.said == (Peer(1, 0), body)
        assert leader.bytes_relayed > 0, "the sideband's bytes"
        into, ended, done = bytearray(7), list[Exception | None](), threading.Event()

        def pulled(error: Exception | None) -> None:
            ended.append(error)
            done.set()

        holders = [leader.lane_address]
        other.call(lambda: other.fetch(holders, KEY, "", memoryview(into), pulled))
        assert done.wait(LIMIT_S)
        assert (ended, into) == ([None], b"payload")
    assert not {t.name for t in threading.enumerate()} & {f"mend-lane-relay-{free_port}"}


def test_leader_relays_to_ranks_of_other_hosts_only(free_port: int) -> None:
    """A host that relayed to itself would connect to itself without end for a rank that died."""
    with io_loop(Peer(0, 0), "tcp://127.0.0.1:0", (free_port, free_port)) as (leader, _):
        away = Address("192.0.2.7", free_port)
        leader.relay([leader.inside, Address("127.0.0.1", free_port), away])
        assert set(leader._lane._holder._elsewhere) == {lane_token(JOB, 2)}


def test_one_port_for_lane_and_sideband_needs_a_key(tmp_path: Path) -> None:
    """Every connection to the sideband then comes from the leader's own machine."""
    create(tmp_path / "key", (SECRET,))
    at: dict[str, Any] = {"sideband_addr": "tcp://127.0.0.1:21900", "rack": 0}
    with pytest.raises(ConfigError, match="needs a key") as refused:
        settings_of(MendConfig(data_ports="21900-21900", **at), None)
    assert refused.value.field == "data_ports"
    keyed = MendConfig(data_ports="21900-21900", key_file=tmp_path / "key", **at)
    assert settings_of(keyed, None).io_loop.has_one_port
    for ports in ("21901-21901", "21900-21901", ""):
        assert not settings_of(MendConfig(data_ports=ports, **at), None).io_loop.has_one_port
