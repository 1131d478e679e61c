"""`mend plan`: its options, and how it prints its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mend.types import CODEC_NAMES, MOMENT_PERIODS

if TYPE_CHECKING:
    from mend.tools.plan import Asked, Choice

GB = 1e9


_Params = Annotated[
    str, typer.Option(metavar="N", help="Trained parameters of the model: 1.5B, 350M, 124000.")
]
_StepMs = Annotated[
    float, typer.Option(min=0.001, help="Milliseconds of an optimizer step without mend.")
]
_Link = Annotated[
    str,
    typer.Option(
        metavar="RATE[,RTT]", help="Link of each rack, such as 1gbit,20ms; its ranks share it."
    ),
]
_Racks = Annotated[int, typer.Option(min=2, max=64, help="Racks that exchange.")]
_Processes = Annotated[
    int, typer.Option(min=1, help="Processes per rack; they share the model and the merging.")
]
_Device = Annotated[
    Literal["cuda", "cpu"],
    typer.Option(help="Device of the model; decides the cost of capture and apply."),
]
_Largest = Annotated[
    str,
    typer.Option(
        metavar="N", help="Elements of the largest tensor, which is not split; often an embedding."
    ),
]
_DelayMs = Annotated[
    float, typer.Option(min=0, help="Milliseconds to add to each exchange, on top of the link.")
]
_MergeNs = Annotated[
    float | None,
    typer.Option(min=0, help="Nanoseconds to merge an element; default: 0.3 + 0.55 per rack."),
]
_Measure = Annotated[
    bool, typer.Option("--measure", help="Measure --merge-ns on this machine, with one thread.")
]
_Codecs = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help=f"Codecs to compare: {CODEC_NAMES}. Of equal loss, tau and bytes the first wins.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def plan_command(
    params: _Params,
    step_ms: _StepMs,
    link: _Link,
    racks: _Racks = 2,
    nproc_per_rack: _Processes = 1,
    largest_tensor: _Largest = "",
    device: _Device = "cuda",
    delay_ms: _DelayMs = 0.0,
    merge_ns: _MergeNs = None,
    measure: _Measure = False,
    codecs: _Codecs = "float32,bfloat16,int8,int4",
    as_json: _Json = False,
) -> None:
    """Recommend settings for a model, a step time and a link, before you rent machines.

    Plan prints H, P, tau and payload as MEND_* variables and as TOML, what they cost, and a table
    of alternatives. The rule: an exchange takes at most 80 % of tau steps, payloads keep the link
    busy for at most 70 % of the time, and tau is at most a quarter of H. What fits is ranked by the
    predicted loss, in percent above data parallel: ~ is an estimate, > a bound.

    Plan calculates only, and prints its assumptions. [bold]mend doctor --meet[/bold] measures the
    machines themselves; [bold]mend launch --link[/bold] tries the settings on one machine.

    Exit status 0: a choice fits; 1: none does, plan says what to change; 2: a wrong argument.

    [bold]Examples[/bold]

      mend plan --params 1.5B --step-ms 400 --link 1gbit --racks 2

      mend plan --params 7B --step-ms 2500 --link 2gbit,60ms --racks 4 --nproc-per-rack 8 --json
    """
    from mend.tools import plan
    from mend.tools.doctor.estimate import merge_ns_per_element, params_of
    from mend.tools.links_spec import Link

    if measure:
        merge_ns = merge_ns_per_element("mean", racks)
    source = "measured here" if measure else "given" if merge_ns is not None else "assumed"
    asked = plan.Asked(
        params_of(params),
        step_ms,
        Link.parse(link),
        racks,
        nproc_per_rack,
        plan.merge_ns_assumed(racks) if merge_ns is None else merge_ns,
        delay_ms,
        device,
        params_of(largest_tensor) if largest_tensor else 0,
        plan.codecs_of(codecs),
    )
    rows = plan.choices(asked, plan.base_config(racks))
    chosen = plan.recommended(rows)
    if as_json:
        import json

        typer.echo(json.dumps(as_data(asked, rows, chosen, source), indent=2))
    else:
        show(asked, rows, chosen, source)
    raise typer.Exit(0 if chosen.good else 1)


def settings(chosen: Choice) -> dict[str, str | int]:
    """Return the settings of the choice, for all racks alike."""
    config = chosen.config
    return {
        "racks": config.racks,
        "sync_period_steps": config.sync_period_steps,
        "fragments": config.fragments,
        "overlap_steps": config.tau,
        **({} if config.exchange_plan == "auto" else {"exchange_plan": config.exchange_plan}),
        "codec": config.codec,
        **{MOMENT_PERIODS[order]: period for order, period in config.moment_periods.items()},
    }


def exports(chosen: Choice) -> list[str]:
    """Return the settings as lines for a shell."""
    return [f"export MEND_{name.upper()}={value}" for name, value in settings(chosen).items()]


def toml(chosen: Choice) -> list[str]:
    """Return the settings as lines of the file that MEND_CONFIG names."""
    lines = (
        f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
        for name, value in settings(chosen).items()
    )
    return ["[mend]", *lines]


def row_data(row: Choice) -> dict[str, Any]:
    """Return a row as data for --json. Rates and bytes are of one rack, each direction; memory is
    of one rank; loss is percent above data parallel (plan_loss)."""
    return {
        **settings(row),
        "fits": row.fits,
        "utilisation": row.utilisation,
        "link_busy": row.link_busy,
        "mbit": row.mbit,
        "exchange_ms": row.exchange.total_ms,
        "longest_ms": row.longest.total_ms,
        "transfer_ms": row.exchange.transfer_ms,
        "trips_ms": row.exchange.trips_ms,
        "work_ms": row.exchange.work_ms,
        "window_ms": row.window_ms,
        "gap_ms": row.gap_ms,
        "wait_ms": row.wait_ms,
        "copy_ms": row.copy_ms,
        "round_bytes": row.exchange.bytes,
        "period_bytes": row.period_bytes,
        "moment_bytes": row.moment_bytes,
        "host_bytes": row.memory.total,
        "device_bytes": row.device_bytes,
        "device_bytes_encoding": row.encoding_bytes,
        "loss_pct": row.loss.percent,
        "loss_known": row.loss.known,
        "loss_pct_alone": row.loss.alone,
        "loss_notes": list(row.loss.notes),
    }


def as_data(asked: Asked, rows: list[Choice], chosen: Choice, source: str) -> dict[str, Any]:
    """Return the whole answer as data for --json."""
    from mend.tools import plan

    return {
        "asked": {
            "params": asked.params,
            "step_ms": asked.step_ms,
            "link": str(asked.link),
            "racks": asked.racks,
            "nproc_per_rack": asked.ranks,
            "delay_ms": asked.delay_ms,
            "device": asked.device,
            "largest_tensor": asked.largest,
        },
        "assumed": {"merge_ns": asked.merge_ns, "merge_ns_is": source, **_constants(asked.device)},
        "recommended": row_data(chosen),
        "start_s": plan.start_seconds(asked),
        "advice": list(plan.advice(asked, chosen)),
        "exports": exports(chosen),
        "toml": "\n".join(toml(chosen)) + "\n",
        "rows": [row_data(row) for row in rows],
        "ranking": [rows.index(row) for row in plan.ranked(rows)],
    }


def _constants(device: str) -> dict[str, float]:
    from mend.tools import plan
    from mend.tools.doctor import estimate as doctor_estimate

    return {
        "link_share": plan.LINK_SHARE,
        "round_trips": doctor_estimate.ROUND_TRIPS,
        "sharded_trips": doctor_estimate.SHARDED_TRIPS,
        "encode_ns": doctor_estimate.ENCODE_NS,
        "side": doctor_estimate.SIDE,
        "copy_ns": plan.COPY_NS[device],
        "margin": doctor_estimate.MARGIN,
        "busy_max": plan.BUSY_MAX,
    }


def show(asked: Asked, rows: list[Choice], chosen: Choice, source: str) -> None:
    """Print the answer."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(recommendation(asked, chosen, source), markup=False)
    console.print("\nThe settings in the file that MEND_CONFIG names:\n")
    for line in toml(chosen):
        console.print(f"  {line}", markup=False)
    console.print()
    console.print(_table(rows, chosen))


def recommendation(asked: Asked, chosen: Choice, source: str) -> str:
    """The settings, what they lead to, the assumptions and the advice: the words of `mend plan` and
    of `mend doctor`."""
    from mend.tools import plan

    question = (
        f"{_count(asked.params)} parameters, {asked.racks} racks of {asked.ranks}, steps of "
        f"{asked.step_ms:g} ms, link {asked.link}"
    )
    settings = "\n".join(f"  {line}" for line in exports(chosen))
    advice = (f"! {line}" for line in plan.advice(asked, chosen))
    parts = (question, settings, "\n".join(outcome(asked, chosen)), assumptions(asked, source))
    return "\n\n".join([*parts, *advice])


def outcome(asked: Asked, chosen: Choice) -> list[str]:
    """Describe what the choice leads to, a line per question."""
    from mend.tools.plan_loss import source_of

    exchange, memory = chosen.exchange, chosen.memory
    more = duration(chosen.longest.total_ms)
    longest = f"with the largest tensor {more}; " if chosen.longest != exchange else ""
    gpu = f"; up to {_gigabytes(chosen.device_bytes, 2)} of its GPU" if chosen.device_bytes else ""
    if chosen.encoding_bytes:
        gpu += f" ({_gigabytes(chosen.encoding_bytes, 2)} with encode_on='device')"
    of_moments = chosen.moment_bytes / chosen.period_bytes if chosen.moment_bytes else 0
    moments = f"; {of_moments:.0%} of it is moments of the optimizer" if of_moments else ""
    begun = {"scratch": "from random weights", "warm": "after a warm start"}[
        chosen.config.outer_start
    ]
    per_hour = chosen.period_bytes * 3.6e6 / (chosen.step_ms * chosen.config.sync_period_steps)
    return [
        f"exchange     {duration(exchange.total_ms)}: {duration(exchange.transfer_ms)} for "
        f"{_megabytes(exchange.bytes)}, {duration(exchange.trips_ms)} for round trips, "
        f"{duration(exchange.work_ms)} to encode and merge, {duration(exchange.delay_ms)} delay; "
        f"{plan_of(chosen)}{longest}tau hides {duration(chosen.window_ms)}",
        f"training     {chosen.utilisation:.1%} of the time; every {duration(chosen.gap_ms)} a "
        f"round takes {duration(chosen.wait_ms)} to wait and {duration(chosen.copy_ms)} to copy",
        f"link         busy {chosen.link_busy:.0%} of the time, {chosen.mbit:.0f} Mbit/s on "
        f"average; {_gigabytes(per_hour)} an hour in, and out{moments}",
        f"memory       {_gigabytes(memory.total)} of the host per rank ({memory.parts()})" + gpu,
        f"loss         {chosen.loss} % above data parallel {begun}, {chosen.loss.known} (a rack "
        f"alone: {chosen.loss.alone:+.0f} %): {source_of(chosen.config)} "
        "(docs/internals/quality.md)",
        f"start        {start_of(asked)}",
    ]


def start_of(asked: Asked) -> str:
    """What the start costs, in words."""
    from mend.tools import plan

    return (
        f"up to {duration(1000 * plan.start_seconds(asked))} to copy rack 0's model; racks that "
        "begin with equal weights (one seed, or one file that every rack loads) copy nothing"
    )


def plan_of(chosen: Choice) -> str:
    """Say what many racks pull."""
    racks = chosen.config.racks
    if chosen.config.sharded:
        return f"sharded, 2 x {racks - 1} / {racks} of a payload; "
    return f"a mesh, {racks - 1} payloads; " if racks > 2 else ""


def _count(numel: int) -> str:
    """In millions, and below one million in full."""
    return f"{numel / 1e6:.4g}M" if numel >= 10**6 else f"{numel:,}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.4g} MB" if size >= 10**5 else f"{size:,.0f} B"


def _gigabytes(size: float, digits: int = 3) -> str:
    return f"{size / GB:.{digits}g} GB" if size >= 10**6 else f"{size:,.0f} B"


def duration(ms: float) -> str:
    """Short: three digits and more only below ten seconds."""
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.0f} s"


def _table(rows: list[Choice], chosen: Choice) -> Any:
    from rich import box
    from rich.table import Table

    from mend.tools import plan

    ranks = {id(row): rank for rank, row in enumerate(plan.ranked(rows), 1)}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    names = ("", "H", "payload", "P", "tau", "exchange", "busy", "waits", "training", "loss")
    for name in names:
        numeric = name not in ("", "payload")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    for row in rows:
        config = row.config
        table.add_row(
            "->" if row is chosen else "",
            str(config.sync_period_steps),
            config.codec,
            str(config.fragments),
            str(config.tau),
            duration(row.longest.total_ms),
            f"{row.link_busy:.0%}",
            duration(row.wait_ms),
            f"{row.utilisation:.1%}",
            str(row.loss),
            str(ranks.get(id(row), "" if row.loss.helps else "no gain")),
        )
    return table


def assumptions(asked: Asked, source: str) -> str:
    """List the assumptions behind the figures."""
    fixed = _constants(asked.device)
    cut = "fragments of equal size" + ("" if asked.largest else " (--largest-tensor not given)")
    if asked.largest:
        cut = f"fragments of equal size but for one tensor of {_count(asked.largest)}"
    if any(name.startswith("powersgd") for name in asked.codecs):
        cut += f"; powersgd as for matrices of {fixed['side']:.0f} x {fixed['side']:.0f}"
    return (
        f"assumed: {fixed['link_share']:.0%} of the rate is payload; an exchange takes "
        f"{fixed['round_trips']:.0f} round trips ({fixed['sharded_trips']:.0f} more where racks "
        f"merge a slice each), {fixed['encode_ns']:g} ns per element to encode "
        f"and {asked.merge_ns:.2f} to merge ({source}), shared by the {asked.ranks} rank(s); "
        f"{fixed['copy_ns']:g} ns per element for capture and apply; {cut}; all "
        "racks equally fast. Not counted: what merging threads take from the one that launches "
        "kernels (2 % with FSDP2, docs/internals/benchmarks.md), nor mirror_rack_state."
    )
