"""A host of the settings that has no address is named, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mend.engine.io_loop import IoLoop


def test_a_host_without_an_address_is_named_with_the_remedy() -> None:
    """ZeroMQ tries for ever without a word: the log had `hello` and nothing else."""
    notes: list[tuple[str, dict[str, object]]] = []
    peers = ("tcp://127.0.0.1:21900", "tcp://no..host:21901", "tcp://no..host:21902", "")
    loop: Any = SimpleNamespace(
        options=SimpleNamespace(peers=peers, socks_proxy=""),
        note=lambda kind, fields: notes.append((kind, fields)),
        _closing=False,
    )
    IoLoop._look_up(loop)
    ((kind, fields),) = notes
    assert (kind, fields["host"]) == ("name-unknown", "no..host")
    assert "MEND_SIDEBAND_PEERS" in str(fields["remedy"])
