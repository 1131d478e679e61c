"""benchmarks._rows: the rows that `mend bench run` knows: names, sizes, peers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A benchmark: a module beside this one that prints one JSON object."""

    name: str
    about: str
    quick: str
    """Arguments that make it run in seconds, and its figures worthless."""
    peers: tuple[str, ...] = ()
    """Distributions that can do the same work."""
    other: str = ""
    """Another name that people look for."""


ROWS = (
    Row(
        "merge",
        "mean + outer step + digest of 2, 4, 8 racks, against memcpy",
        quick="--numel 50000 --racks 2 --threads 2 --repeats 2",
        peers=("tsugi-mend",),
    ),
    Row(
        "encode",
        "delta, check, codec, checksum of an offer, against memcpy",
        quick="--numel 50000 --repeats 2",
        peers=("tsugi-mend",),
    ),
    Row(
        "lane",
        "pull of 512 MB over loopback, with and without keys, against one raw socket",
        quick="--megabytes 2 --repeats 2",
    ),
    Row(
        "floods",
        "commits of a job under floods, beside the same floods at a bystander",
        quick="--repeats 1 --seconds 0.3 --floods garbage",
    ),
    Row(
        "sideband",
        "CPU of 100 ms heartbeats with 8 peers",
        quick="--seconds 1 --runs 1 --peers 1",
        peers=("tsugi-mend",),
    ),
    Row(
        "control",
        "the coordinator of 8 racks of 72 ranks, of a core",
        quick="--racks 2 --ranks 2 --fragments 2 --seconds 1",
    ),
    Row(
        "hooks",
        "what mend adds to a step in which nothing is due",
        quick="--steps 10 --blocks 3",
        peers=("tsugi-mend",),
    ),
    Row(
        "tape",
        "what a tape adds to an event on the loop thread",
        quick="--events 500 --repeats 2",
    ),
    Row(
        "heartbeat",
        "largest gap between heartbeats during merges of 4 x 100M",
        quick="--numel 50000 --members 2 --merges 1",
        peers=("tsugi-mend",),
    ),
    Row(
        "stall",
        "capture + apply of an overlapped round on the training thread",
        quick="--numel 20000 --fragments 2 --gap 3 --overlap 2 --rounds 2 --step-ms 10",
    ),
    Row(
        "outer_sync",
        "one blocking outer step of 201 MB, against gloo's all_reduce",
        quick="--numel 300000 --repeats 2 --fragments 2 --momentum 0.5",
        peers=("torchft", "hivemind"),
    ),
    Row(
        "straggler",
        "a rack 15 times slower: what the fast ones lose per round",
        quick="--repeats 1 --seconds 2 --step-ms 10 --factor 4",
        peers=("torchft",),
    ),
    Row(
        "unequal",
        "tokens per second of racks of the speeds 1 : .5 : .25, against each alone",
        quick="--repeats 1 --seconds 1 --step-ms 5 --period 16 --overlap 4 --numel 20000",
    ),
    Row(
        "kill",
        "kill -9 of one rack of two: the survivor's next merge",
        quick="--repeats 1 --cases three --step-ms 10 --wait-s 3",
        peers=("torchft",),
    ),
    Row(
        "checkpoint",
        "a checkpoint in the background: what training waits",
        quick="--numel 100000 --repeats 2",
    ),
    Row(
        "rejoin",
        "a killed rack is started again: the survivor's stall",
        quick="--repeats 1 --numel 20000 --step-ms 10 --fragments 2",
    ),
    Row(
        "takeover",
        "kill -9 of the rack that coordinates: merging again, nothing lost",
        quick="--repeats 1 --steps 150 --kill-at 20 --step-ms 20 --stall-max-s 0",
        other="coordinator-kill",
    ),
)
