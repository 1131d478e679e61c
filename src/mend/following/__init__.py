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
    seconds without an answer of a running job, after which GaveUp is raised; None: it waits on.

    A version is one commit, compared with the digests in the job's log before it is given. A
    follower that was away or slow gets the present version, and the number of those it has missed.
    Closing the iterator ends it. Raises ConfigError for a wrong address, key or number.
    """
    keys = read_keys(Path(key_file)) if key_file is not None else secrets_in_force()
    given = [addresses] if isinstance(addresses, str) else list(addresses)
    proxy, limit_s = socks_proxy_in_force(), math.inf if wait_s is None else wait_s
    follower = Follower(given, keys, job_id, proxy, every=every, wait_s=limit_s)
    with closing(follower):
        yield from follower
