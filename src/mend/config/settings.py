"""The table of settings, and the values that follow from them. Reads no source itself."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from mend.config import kinds as k
from mend.config.declared import Declared, Group, Scope, setting, text_of
from mend.config.exchange_plan import is_sharded, unsharded
from mend.config.override import override_in_force
from mend.config.pair_warnings import default_momentum, default_overlap, warn_pairs
from mend.config.registered import NESTEROV, OWN_MERGES, is_codec, is_merge, is_outer, refusal
from mend.config.sources import from_arguments, from_environment, from_toml
from mend.errors import ConfigError
from mend.status.metrics_server import without_package
from mend.types import MOMENT_PERIODS, OWN_CODECS, RACKS_MAX

PORT_FIRST = 21_900
"""Rack r listens on port PORT_FIRST + r of the loopback interface by default."""

STALL_S, STALL_BLOCKING_S = 0.1, 1.0
"""Adaptive `stall_max_s` where the exchange overlaps training, and where it does not."""

RAMP_ROUNDS = {"scratch": 10, "warm": 5}
"""outer_start -> rounds of the ramp of momentum and overlap; the runs are in
benchmarks/results/quality_gpu.md."""

_SPELLED = {"bf16": "bfloat16", "powersgd": "powersgd-4"}
"""Short names -> codec."""


def _codec(value: Any) -> str:
    k.refuse_unless(isinstance(value, str))
    k.refuse_unless(value in OWN_CODECS or value in _SPELLED or is_codec(value))
    return str(_SPELLED.get(value, value))


CODEC = k.Kind(
    f"one of {', '.join(OWN_CODECS)}, powersgd-R with R columns of 1 to 64 (powersgd: 4), or the "
    "name of a registered codec",
    _codec,
)

AGE_MAX_OF_BASES = 8
"""Most rounds that an offer of powersgd may be late: an anchor holds the bases of so many."""

_Class = TypeVar("_Class", bound=type)

Conflict = tuple[str, str, str]
"""(setting, rule that its value breaks, remedy)"""


class Setting(NamedTuple):
    """A row of the table of settings."""

    field: str
    default: Any
    declared: Declared

    @property
    def unit(self) -> str:
        """Unit of its value; empty: it has none."""
        return self.declared.kind.unit


_people = functools.partial(setting, Group.PEOPLE)
_tuning = functools.partial(setting, Group.TUNING)
_experiment = functools.partial(setting, Group.EXPERIMENT)


def _from_all_sources(cls: _Class) -> _Class:
    """Make `cls(...)` read what was not given from the environment and the TOML file, and check
    every value.

    `dataclasses.replace` passes every field, and in `named` which of them a source had named. So it
    reads no source again, and a configuration never changes after it was made. Neither does an
    unpickled one, for which `__init__` is not called.
    """
    generated: Callable[..., None] = getattr(cls, "__init__")  # noqa: B009  # of the class: mypy

    @functools.wraps(generated)
    def merged(self: object, **given: Any) -> None:
        generated(self, **_decided(cls, given))

    shown = inspect.signature(generated)
    shown = shown.replace(parameters=[p for p in shown.parameters.values() if p.name != "named"])
    merged.__signature__ = shown  # type: ignore[attr-defined]  # what inspect looks for
    type.__setattr__(cls, "__init__", merged)
    return cls


def _table(cls: Any) -> tuple[Setting, ...]:
    return tuple(Setting(f.name, f.default, f.metadata[Declared.__name__]) for f in fields(cls))


def _kinds(cls: Any) -> dict[str, k.Kind]:
    return {row.field: row.declared.kind for row in _table(cls)}


def _decided(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A checked value for every field, and the names of the fields that a source named."""
    rules = _kinds(cls)
    before: frozenset[str] | None = given.pop("named", None)
    named = from_arguments(rules, given)
    if len(named) < len(rules):
        environment = from_environment(rules)
        named = {**from_toml(rules), **environment, **named}
        own = frozenset(named)
        if (override := override_in_force()) is not None:
            named |= override.named(rules, environment, named)
    else:
        own = frozenset(named) if before is None else before
    values: dict[str, Any] = {f.name: f.default for f in fields(cls)}
    for name, source in named.items():
        try:
            values[name] = rules[name].accept(source.value)
        except (ValueError, TypeError, OverflowError):
            raise refusal(name, rules[name], source) from None
    if "racks" not in named:
        values["racks"] = _racks_at_least(values)
    values["sideband_peers"] = _in_rack_order(values, counted="racks" in own)
    return {**values, "named": own}


def _racks_at_least(values: Mapping[str, Any]) -> int:
    """The number of racks when no source names it: at least merge_min_racks, and all racks
    whose address is known."""
    least: int = max(values["racks"], values["merge_min_racks"])
    peers: tuple[str, ...] = values["sideband_peers"]
    if not (peers and values["sideband_addr"]):
        return least
    racks = {int(peer.partition("=")[0]) for peer in peers if "=" in peer}
    if values["rack"] is not None and values["rack"] <= len(peers):
        racks.add(values["rack"])
    return max(least, len(peers), *(rack + 1 for rack in racks))


def _in_rack_order(values: Mapping[str, Any], *, counted: bool) -> tuple[str, ...]:
    """The peers, numbered if a plain list must contain all racks: a source says how many racks
    there are, or no other setting has the address of this one."""
    peers: tuple[str, ...] = values["sideband_peers"]
    plain = bool(peers) and "=" not in peers[0]
    if plain and len(peers) == values["racks"] and (counted or not values["sideband_addr"]):
        return k.numbered(dict(enumerate(peers)))
    return peers


@_from_all_sources
@dataclass(frozen=True, kw_only=True)
class MendConfig:
    """All settings of one rack, each declared here and nowhere else; docs/configuration.md has the
    table of them.

    Settings that are not given as arguments come from MEND_* and the file that MEND_CONFIG names.
    Raises ConfigError for a value that breaks its rule, for two values that contradict each other,
    and for an argument, variable or key of the file that is not a setting.
    """

    rack: int | None = _people(
        None,
        k.optional(k.whole(0, RACKS_MAX - 1)),
        "number of this rack; racks merge in ascending order",
        Scope.RACK,
    )
    racks: int = _people(
        2,
        k.whole(1, RACKS_MAX, "racks"),
        "number of racks in the job; if no source sets it, at least merge_min_racks",
        Scope.JOB,
    )
    job_id: str = _people(
        "mend", k.JOB, "name of the job; messages of other jobs are refused", Scope.JOB
    )
    sync_period_steps: int = _people(
        32,
        k.whole(1, unit="steps"),
        "optimizer steps between two exchanges of the same fragment (H)",
        Scope.PLAN,
    )
    overlap_steps: int | None = _people(
        None,
        k.optional(k.whole(0, unit="steps")),
        "most steps between capture and apply (tau), less than sync_period_steps; none: a "
        "quarter of it, at most 8",
        Scope.PLAN,
        "tau",
    )
    fragments: int = _people(
        4,
        k.whole(1, 1024, "fragments"),
        "number of parts in which the model is exchanged (P)",
        Scope.PLAN,
    )
    outer_start: Literal["scratch", "warm"] = _people(
        "scratch",
        k.one_of("scratch", "warm"),
        "start of the racks: random weights (momentum and overlap rise over 10 rounds) or "
        "trained weights (over 5)",
        Scope.PLAN,
    )
    merge_min_racks: int = _people(
        1, k.whole(1, RACKS_MAX, "racks"), "least number of offers for a merge (K)", Scope.JOB
    )
    codec: str = _people(
        "int8",
        CODEC,
        "encoding of the deltas on the wire; a later round sends the part that it drops "
        "(compression.md)",
        Scope.PLAN,
    )
    failslow_action: Literal["detect", "validate", "act", "evict"] = _people(
        "validate",
        k.one_of("detect", "validate", "act", "evict"),
        "fail-slow: response to a verdict. detect: report it; validate: also find the cause "
        "with a micro-benchmark of less than a second; act: also give the rack fewer micro-"
        "batches if the script asks, or stop waiting for it, if that costs less; evict: also "
        "make it leave to be started again, which mend launch does (not in lockstep)",
        Scope.JOB,
    )
    sideband_addr: str = _people(
        "",
        k.BIND,
        "address at which this rack's leader listens; empty: its own entry of sideband_peers",
        Scope.RACK,
    )
    sideband_peers: tuple[str, ...] | Mapping[int, str] | str = _people(
        (),
        k.PEERS,
        "addresses of the leaders of all racks; empty: tcp://127.0.0.1:(21900 + rack)",
        Scope.RACK,
    )
    witness_addr: str = _people(
        "", k.ADDRESS, "address of the witness; empty: the leader of rack 0 coordinates", Scope.RACK
    )
    advertise_host: str = _people(
        "",
        k.HOST,
        "host at which other racks reach this one; empty: the one at which it listens",
        Scope.RACK,
    )
    data_ports: str = _people(
        "",
        k.PORTS,
        "ports for bulk data; a single one is shared by all ranks of a host, and may be the"
        " sideband's; empty: any free ones",
        Scope.RACK,
    )
    key_file: Path | str | None = _people(  # noqa: RUF009  # a Path is as frozen as the rest
        None,
        k.FILE,
        "file with the job's key (`mend keys new FILE`), which encrypts and authenticates all"
        " traffic; required if sideband_addr is not on the loopback interface",
        Scope.RACK,
    )
    diagnostics_dir: Path | str | None = _people(  # noqa: RUF009  # a Path is as frozen as the rest
        None,
        k.FOLDER,
        "folder in which each rank writes its events and its tape; none: they are not written",
        Scope.RACK,
    )

    grace_window_ms: float | Literal["adaptive"] = _tuning(
        "adaptive",
        k.either(k.MILLISECONDS, "adaptive", "adaptive"),
        "wait for more racks after K offers have arrived; adaptive: as long as the overlap "
        "hides it",
        Scope.JOB,
    )
    expected_racks: tuple[int, ...] = _tuning(
        (),
        k.RACK_NUMBERS,
        "racks that a round waits for, such as 0, 2: it closes as soon as they are in; empty: "
        "all live racks",
        Scope.JOB,
    )
    staleness_max_rounds: int = _tuning(
        2,
        k.whole(0, 64, "rounds"),
        "number of rounds that an offer may be late and still be merged",
        Scope.PLAN,
    )
    lockstep: bool = _tuning(
        False, k.YES_NO, "every rack waits for every round at its apply point", Scope.PLAN
    )
    exchange_plan: Literal["auto", "mesh", "sharded"] = _tuning(
        "auto",
        k.one_of("auto", "mesh", "sharded"),
        "plan of a round's pulls. mesh: all payloads of the other racks; sharded: one slice "
        "of each payload to merge, and the slices that others merged; auto: sharded with four"
        " or more racks if that is fewer bytes, else mesh",
        Scope.JOB,
        "plan_in_force",
    )
    exchange_frozen: bool = _tuning(
        False,
        k.YES_NO,
        "also exchange parameters that require no gradient, for parameters that are unfrozen later",
        Scope.PLAN,
    )
    exchange_statistics: bool = _tuning(
        True,
        k.YES_NO,
        "average the running statistics of BatchNorm and its like over the racks, every "
        "sync_period_steps and at the end; false: each rack keeps its own",
        Scope.PLAN,
    )
    momentum_sync_period_steps: int | None = _tuning(
        None,
        k.optional(k.whole(1, unit="steps")),
        "steps between two averages of the inner optimizer's first moments over the racks "
        "(exp_avg, momentum_buffer): K_u of DES-LOC; none: never. Usual: three times "
        "sync_period_steps",
        Scope.PLAN,
    )
    second_moment_sync_period_steps: int | None = _tuning(
        None,
        k.optional(k.whole(1, unit="steps")),
        "the same for the second moments (exp_avg_sq): K_v. Usual: six times sync_period_steps",
        Scope.PLAN,
    )
    ranks_by_rack: tuple[int, ...] = _tuning(
        (), k.SIZES, "numbers of ranks, where racks have different ones", Scope.PLAN
    )
    token_weighted_merge: bool = _tuning(
        True, k.YES_NO, "weight offers by their tokens; false: all offers count alike", Scope.PLAN
    )
    merge: str = _tuning(
        "mean",
        k.text(f"{', '.join(OWN_MERGES)}, or the name of a registered one", is_merge),
        "rule that combines the racks' deltas; rda: per tensor the mean length in the mean "
        "direction (internals/numerics.md)",
        Scope.PLAN,
    )
    merge_mean_names: tuple[str, ...] = _tuning(
        ("*embed*", "*wte*", "*wpe*"),
        k.NAMES,
        "patterns of parameters that merge=rda, and any rule that measures tensors, averages "
        "plainly, in addition to all nn.Embedding",
        Scope.PLAN,
    )
    outer_optimizer: str = _tuning(
        NESTEROV,
        k.text(f"{NESTEROV}, or the name of a registered one", is_outer),
        "rule that makes the next anchor from the racks' merged delta (internals/numerics.md)",
        Scope.PLAN,
    )
    outer_lr: float = _tuning(
        1.0,
        k.OUTER_LR,
        "step size of the outer optimizer; 1 without momentum averages the racks",
        Scope.PLAN,
    )
    outer_optimizer_momentum: float | None = _tuning(
        None,
        k.optional(k.MOMENTUM),
        "Nesterov momentum of the outer optimizer at the end of its ramp; none: for R racks "
        "R H / (R H + 32), at most 0.9",
        Scope.PLAN,
        "outer_momentum",
    )
    outer_ramp_rounds: int | None = _tuning(
        None,
        k.optional(k.whole(0, 1_000_000, "rounds")),
        "c: after k rounds of a fragment its momentum is k / (k + c), at most "
        "outer_optimizer_momentum, and in lockstep tau rises likewise; 0: full values from the "
        "first round; none: chosen by outer_start",
        Scope.PLAN,
        "ramp_rounds",
    )
    encode_on: Literal["host", "device"] = _tuning(
        "host",
        k.one_of("host", "device"),
        "place where offers are encoded; device: on the GPU, with bfloat16, int8, int4, e3m0 or "
        "topk, for 8 bytes of GPU memory per parameter that the rank owns (compression.md)",
        Scope.RACK,
    )
    join_copies_state: bool = _tuning(
        True,
        k.YES_NO,
        "a rack that joins a running job gets the optimizer's state, the registered objects "
        "and the step from another rack; false: they begin fresh",
        Scope.RACK,
    )
    mirror_rack_state: bool = _tuning(
        False,
        k.YES_NO,
        "each rack keeps in memory the objects that another rack registered with scope rack, "
        "as of its newest merged round, so that a rack that returns continues at its own "
        "place in the data; at most 64 MiB per rank and round (joining.md)",
        Scope.JOB,
    )
    restart_attests_death: bool = _tuning(
        True,
        k.YES_NO,
        "a rack that is started again proves that its former life is dead, so that the others"
        " may go on",
        Scope.JOB,
    )
    stall_max_s: float | Literal["adaptive"] = _tuning(
        "adaptive",
        k.either(k.seconds(), "adaptive", "adaptive"),
        "longest time that an outage elsewhere may hold up training here; adaptive: 0.1, or 1"
        " if nothing overlaps (overlap_steps 0, concurrent_outer_step false)",
        Scope.JOB,
        "stall_s",
    )
    seat_timeout_s: float = _tuning(
        600.0,
        k.seconds(),
        "a rack that is silent for this long loses its seat and must join again; 0: never",
        Scope.JOB,
    )
    start_timeout_s: float = _tuning(
        120.0,
        k.seconds(0.001),
        "longest wait for all racks to say hello; twice that for the first version, and longer"
        " while its bytes arrive",
        Scope.RACK,
    )
    shutdown_timeout_s: float = _tuning(
        60.0,
        k.seconds(),
        "longest wait at the end for the last exchange and for racks that are still training;"
        " longer while bytes of the last exchange arrive",
        Scope.RACK,
    )
    wait_timeout_s: float = _tuning(
        600.0,
        k.seconds(0.001),
        "last limit of a wait that may be long (lockstep, blocking)",
        Scope.RACK,
    )
    transfer_stall_s: float = _tuning(
        10.0,
        k.seconds(0.001),
        "after this long without a verified byte, ask the next holder; a wait at the start or the"
        " end that is past its limit ends",
        Scope.RACK,
    )
    sideband_heartbeat_ms: int = _tuning(
        100, k.whole(10, 10_000, "ms"), "time between two heartbeats", Scope.RACK
    )
    failslow_window_steps: int = _tuning(
        64,
        k.whole(2, 4096, "steps"),
        "fail-slow: the prior expects a change of speed every 4 windows; a rank is compared "
        "with its past 3 windows",
        Scope.RACK,
    )
    failslow_zscore_threshold: float = _tuning(
        3.0,
        k.POSITIVE,
        "fail-slow: samples beyond this many standard deviations are cut; a change must be as"
        " unlikely by chance (3.0: 0.3 %)",
        Scope.RACK,
    )
    failslow_min_samples: int = _tuning(
        8,
        k.whole(2, 4096, "samples"),
        "fail-slow: samples before a rank is judged, and samples after a change to verify it",
        Scope.RACK,
    )
    encrypt_payloads: bool = _tuning(
        True,
        k.YES_NO,
        "with a key: encrypt payloads; false: only authenticate them, for less than half of "
        "the CPU; anyone on the path can then read weights",
        Scope.JOB,
    )
    insecure: bool = _tuning(
        False, k.YES_NO, "listen beyond the loopback interface even without a key", Scope.RACK
    )
    socks_proxy: str = _tuning(
        "",
        k.ADDRESS,
        "SOCKS5 proxy, such as `ssh -D` makes one, through which the other racks and the witness"
        " are reached; with a key only; empty: none",
        Scope.RACK,
    )
    rack_aware: bool = _tuning(
        False,
        k.YES_NO,
        "find out which ranks of one torchrun share a rack, as mend.rack_mesh does; false: "
        "all ranks do, unless mend_init is given a mesh",
        Scope.RACK,
    )
    observe: bool = _tuning(
        True, k.YES_NO, "answer `mend top`; it can look at the job and change nothing", Scope.RACK
    )
    metrics_port: int = _tuning(
        0,
        k.whole(0, 65_535),
        "port at which the rack's leader, and the witness, serve metrics for Prometheus; 0: none",
        Scope.RACK,
    )
    metrics_host: str = _tuning(
        "",
        k.HOST,
        "address at which metrics are served, to everyone who reaches it; empty: loopback only",
        Scope.RACK,
    )
    tape_max_mb: int = _tuning(
        1024,
        k.whole(0, unit="mb"),
        "largest size of a rank's tape; the oldest files are deleted, and replay begins at "
        "the oldest one left; 0: no tape",
        Scope.RACK,
    )
    async_tp_enabled: bool = _tuning(
        False,
        k.YES_NO,
        "pipeline the tensor parallelism of compiled models through the GPUs' shared memory; "
        "status().async_tp reports the effect",
        Scope.RACK,
    )

    exchange: bool = _experiment(
        True,
        k.YES_NO,
        "false: this rack trains alone, with hooks and events but without other racks; a "
        "baseline for measurements",
        Scope.RACK,
    )
    concurrent_outer_step: bool = _experiment(
        True,
        k.YES_NO,
        "exchange while training goes on; false: training waits for each exchange",
        Scope.RACK,
    )
    apply_mode: Literal["carry", "overwrite", "blend"] = _experiment(
        "carry",
        k.one_of("carry", "overwrite", "blend"),
        "treatment of the steps made since the capture: carry keeps them, overwrite drops "
        "them, blend keeps a part",
        Scope.PLAN,
    )
    blend_alpha: float = _experiment(
        0.5, k.SHARE, "share of the local weights that apply_mode=blend keeps", Scope.PLAN
    )
    simulated_merge_delay_ms: float = _experiment(
        0.0, k.MILLISECONDS, "mean delay added to every transfer, for experiments", Scope.RACK
    )
    simulated_merge_delay_distribution: Literal["constant", "bimodal", "long_tail"] = _experiment(
        "constant",
        k.one_of("constant", "bimodal", "long_tail"),
        "distribution of the added delay",
        Scope.RACK,
    )
    simulated_merge_delay_seed: int = _experiment(
        0, k.whole(0, 2**63 - 1), "seed of the added delay", Scope.RACK
    )

    named: InitVar[frozenset[str] | None] = None
    """The fields that a source named. `dataclasses.replace` passes it on."""

    def __post_init__(self, named: frozenset[str] | None) -> None:
        object.__setattr__(self, "named", named or frozenset())
        _refuse_pairs(self)
        warn_pairs(self)

    @property
    def tau(self) -> int:
        """Most steps between capture and apply before training waits."""
        if self.overlap_steps is not None:
            return self.overlap_steps
        return default_overlap(self.sync_period_steps)

    @property
    def stall_s(self) -> float:
        """Longest wait of training for a result in one outage. With an overlap, a late result is
        applied a quarter of the overlap later. Without one, training waits for every round."""
        if self.stall_max_s != "adaptive":
            return float(self.stall_max_s)
        return STALL_S if self.tau and self.concurrent_outer_step else STALL_BLOCKING_S

    @property
    def sharded(self) -> bool:
        """Whether each rack merges a slice (exchange_plan)."""
        return is_sharded(self.exchange_plan, self.codec, self.merge, self.racks)

    @property
    def plan_in_force(self) -> Literal["mesh", "sharded"]:
        """The plan of a round's pulls."""
        return "sharded" if self.sharded else "mesh"

    @property
    def moment_periods(self) -> dict[int, int]:
        """Periods of the moments that are exchanged: order (first, second) -> steps."""
        given: dict[int, int | None] = {
            order: getattr(self, n) for order, n in MOMENT_PERIODS.items()
        }
        return {order: period for order, period in given.items() if period is not None}

    @property
    def outer_momentum(self) -> float:
        """Momentum of the outer optimizer at the end of its ramp."""
        if self.outer_optimizer_momentum is not None:
            return self.outer_optimizer_momentum
        return default_momentum(self.sync_period_steps, self.racks)

    @property
    def ramp_rounds(self) -> int:
        """Rounds of the ramp of outer momentum and overlap; 0: there is none."""
        given = self.outer_ramp_rounds
        return RAMP_ROUNDS[self.outer_start] if given is None else given

    @property
    def rack_number(self) -> int:
        """The number of this rack. Raises ConfigError if no source gives it."""
        if self.rack is None:
            remedy = "Pass rack=... or set MEND_RACK; mend launch sets it."
            raise ConfigError("rack", None, "nothing says which rack this is", remedy)
        return self.rack

    @property
    def bind_address(self) -> str:
        """Address of this rack's leader, as tcp://host:port. Raises like rack_number."""
        return self.sideband_addr or self.peer_addresses[self.rack_number]

    @property
    def listens_everywhere(self) -> bool:
        """Whether sideband_addr stands for every address of this machine."""
        return self.sideband_addr.startswith(("tcp://0.0.0.0:", "tcp://[::]:"))

    @property
    def peer_addresses(self) -> dict[int, str]:
        """Where the leader of each rack listens, ascending by rack, as far as the settings say it.

        If the list has only the other racks, this rack's address is missing until `placing.place`
        has found it. While the number of this rack is unknown, the others count as racks 0, 1, ...
        """
        if not self.sideband_peers:
            return {rack: f"tcp://127.0.0.1:{PORT_FIRST + rack}" for rack in range(self.racks)}
        peers = [str(entry) for entry in self.sideband_peers]
        if "=" in peers[0]:
            pairs = (peer.partition("=") for peer in peers)
            return {int(rack): address for rack, _, address in pairs}
        others_only = len(peers) < self.racks
        numbers = range(len(peers) + 1)
        return dict(
            zip((n for n in numbers if not others_only or n != self.rack), peers, strict=False)
        )

    def is_named(self, name: str) -> bool:
        """Return whether an argument, the environment or the TOML file named this setting."""
        return name in getattr(self, "named")  # noqa: B009  # mypy takes it for the class's None

    @property
    def data_port_range(self) -> tuple[int, int] | None:
        """First and last port for bulk data. None: any."""
        if not self.data_ports:
            return None
        low, high = map(int, self.data_ports.split("-"))
        return low, high

    def in_force(self, name: str) -> Any:
        """The value of a setting that applies: if it was not given, it may follow from others."""
        declared: Declared = self.__dataclass_fields__[name].metadata[Declared.__name__]
        return getattr(self, declared.in_force or name)

    def facts(self, scope: Scope) -> tuple[tuple[str, str], ...]:
        """(setting, text of its value in force) for all settings of a scope. Racks compare them at
        the start.

        The momentum is compared as it was given. Its default follows from other settings that are
        compared, and from the number of racks, which may change when a checkpoint is resumed.
        """
        names = (row.field for row in _table(type(self)) if row.declared.scope is scope)
        as_given = "outer_optimizer_momentum"
        return tuple(
            (name, text_of(getattr(self, name) if name == as_given else self.in_force(name)))
            for name in names
        )


def describe() -> tuple[Setting, ...]:
    """Every setting, in the order of the class."""
    return _table(MendConfig)


def kinds() -> dict[str, k.Kind]:
    """Name of each setting -> the values that it may have."""
    return _kinds(MendConfig)


def _refuse_pairs(c: MendConfig) -> None:
    """Raise ConfigError for the first settings that are valid alone but not together."""
    for conflicts in (
        _job_conflicts, _codec_conflicts, _security_conflicts, _rack_conflicts,
        _address_conflicts, _metrics_conflicts,
    ):  # fmt: skip
        for field_name, rule, remedy in conflicts(c):
            raise ConfigError(field_name, getattr(c, field_name), rule, remedy)


def _job_conflicts(c: MendConfig) -> Iterator[Conflict]:
    if c.rack is not None and c.rack >= c.racks:
        rule = f"the racks are numbered 0 to {c.racks - 1}, as racks={c.racks}"
        yield "rack", rule, f"Set racks (MEND_RACKS) to {c.rack + 1} or more."
    if c.merge_min_racks > c.racks:
        rule = f"no merge could ever happen, as racks={c.racks}"
        yield "merge_min_racks", rule, "Lower merge_min_racks, or raise racks."
    if c.tau >= c.sync_period_steps:
        rule = f"must be less than sync_period_steps={c.sync_period_steps}"
        yield "overlap_steps", rule, f"Use {c.sync_period_steps // 4} or less, or leave it out."
    for order, period in c.moment_periods.items():
        if c.tau >= period:
            rule = f"must be more than overlap_steps, which is {c.tau}"
            remedy = f"Use {3 * order * c.sync_period_steps}, or leave it out."
            yield MOMENT_PERIODS[order], rule, remedy


def _codec_conflicts(c: MendConfig) -> Iterator[Conflict]:
    if c.codec.startswith("powersgd-") and c.staleness_max_rounds > AGE_MAX_OF_BASES:
        rule = f"must be {AGE_MAX_OF_BASES} or less with powersgd, which keeps a basis per round"
        yield "staleness_max_rounds", rule, "Lower it, or use another codec."
    if c.encode_on == "device":
        from mend.codec.on_device import ON_DEVICE, no_kernel  # loads torch

        if c.codec not in ON_DEVICE:
            raise no_kernel(c.codec)


def _security_conflicts(c: MendConfig) -> Iterator[Conflict]:
    if c.key_file is not None and not os.access(c.key_file, os.R_OK):
        yield "key_file", "cannot be read by this user", "Make one with `mend keys new FILE`."
    if c.insecure and c.key_file is not None:
        yield "insecure", "has no effect with a key_file", "Leave one of the two out."
    if c.socks_proxy and c.key_file is None:
        rule = "needs a key: behind a proxy nothing shows which machine a peer is"
        yield "socks_proxy", rule, "Make a key with `mend keys new FILE`, and set key_file."
    if not c.encrypt_payloads and c.key_file is None:
        rule = "has no effect without a key_file: nothing is encrypted or authenticated"
        yield "encrypt_payloads", rule, "Set key_file, or leave it out."


def _rack_conflicts(c: MendConfig) -> Iterator[Conflict]:
    if c.expected_racks and c.expected_racks[-1] >= c.racks:
        rule = f"the racks are numbered 0 to {c.racks - 1}, as racks={c.racks}"
        yield "expected_racks", rule, "Name racks of the job."
    if c.expected_racks and c.lockstep:
        rule = "must be empty with lockstep=True, in which a round waits for every rack"
        yield "expected_racks", rule, "Leave it out, or lockstep."
    if c.ranks_by_rack and len(c.ranks_by_rack) != c.racks:
        rule = f"names {len(c.ranks_by_rack)} racks, and racks={c.racks}"
        yield "ranks_by_rack", rule, "Give a number for each rack, as 2,4; or leave it out."
    if len(set(c.ranks_by_rack)) > 1 and c.mirror_rack_state:
        rule = "does not work with racks of different sizes (ranks_by_rack)"
        yield "mirror_rack_state", rule, "Leave one of the two out."
    if c.exchange_plan == "sharded" and (rule := unsharded(c.codec, c.merge, c.racks)):
        yield "exchange_plan", rule, "Use mesh, or auto."
    if c.mirror_rack_state and c.lockstep:
        rule = "does not work with lockstep=True, in which no rack joins a running job"
        yield "mirror_rack_state", rule, "Leave one of the two out."
    if c.failslow_min_samples > c.failslow_window_steps:
        rule = f"must not exceed failslow_window_steps={c.failslow_window_steps}"
        yield "failslow_min_samples", rule, "Lower it, or raise the window."
    if c.lockstep and c.failslow_action == "evict":
        rule = "a rack that was started again is refused in lockstep"
        yield "failslow_action", rule, "Use act, or no lockstep."


def _address_conflicts(c: MendConfig) -> Iterator[Conflict]:
    """The list must name all racks, or all but this one if sideband_addr has its address."""
    known, all_racks = set(c.peer_addresses), set(range(c.racks))
    others_only = known < all_racks and len(known) == c.racks - 1 and c.rack not in known
    if known != all_racks and not c.sideband_addr:
        rule = (
            f"must name the racks 0 to {c.racks - 1}, this one too, as racks={c.racks} and "
            "sideband_addr is empty"
        )
        remedy = "List them in rack order, or set sideband_addr, where this rack listens."
        yield "sideband_peers", rule, remedy
    elif known != all_racks and not others_only:
        rule = f"must name the racks 0 to {c.racks - 1}, or all but this one, as racks={c.racks}"
        remedy = "List them in rack order, or as 0=tcp://host:port,1=tcp://host:port."
        yield "sideband_peers", rule, remedy
    if c.listens_everywhere and not c.advertise_host and not c.sideband_peers:
        rule = "listens everywhere, so it does not say where others reach this rack"
        yield "sideband_addr", rule, "Set advertise_host, or listen at one address."


def _metrics_conflicts(c: MendConfig) -> Iterator[Conflict]:
    if c.metrics_port and find_spec("prometheus_client") is None:
        error = without_package(c.metrics_port)
        yield error.field, error.rule, error.remedy


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise the ConfigError that every `MendConfig(...)` under these variables would raise,
    whatever its arguments: for an unknown name, or a text or file that cannot be parsed."""
    from_environment(kinds(), environ)
    from_toml(kinds(), environ)
