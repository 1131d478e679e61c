"""Follows the merged model of a running job from outside, without a vote or a seat in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from mend.config.keyfile import read_keys, secrets_in_force
from mend.config.sources import socks_proxy_in_force
from mend.following.follower import Follower, Version

__all__ = ["Version", "follow"]


def follow(
    addresses: str | Sequence[str],
    *,
    key_file: str | Path | None = None,
    job_id: str = "",
    every: int = 1,
    wait_s: float | None = None,
) -> Iterator[Version]:
    """The merged model of a running job, version by version, from the present one to the job's end.

    `addresses`: `tcp://host:port` of the leader of any rack, or of the witness. `key_file`: the key
    of the job, or one of `mend keys reader`; None: that of MEND_KEY_FILE, if it is set. `job_id`:
    empty: any job that answers. `every`: only every n-th version; 0: always the newest. `wait_s`:
    seconds without an answer of a running job, after which GaveUp is raised; None: never.

    A version is one commit, compared with the digests in the job's log before it is given. A
    follower that was away or slow gets the present version, and the number of those it has missed.
    Closing the iterator ends it. Raises ConfigError for a wrong address, key or number.
    """
    given = [addresses] if isinstance(addresses, str) else addresses
    limit_s = math.inf if wait_s is None else wait_s
    with closing(follower_of(given, key_file, job_id, every, limit_s)) as follower:
        yield from follower


def follower_of(
    addresses: Sequence[str], key_file: str | Path | None, job_id: str, every: int, wait_s: float
) -> Follower:
    """The follower of `follow`, with the proxy, and by default the key, of the environment. The
    caller must close it. Raises ConfigError."""
    keys = read_keys(Path(key_file)) if key_file is not None else secrets_in_force()
    return Follower(addresses, keys, job_id, socks_proxy_in_force(), every=every, wait_s=wait_s)
