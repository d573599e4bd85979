"""Measures everything that the kernel's speed is judged by, in one run, and says which bars it meets.

On a GPU these are the bars of the kernel and of the XLA path there; elsewhere the one of the XLA path.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax

from layouts import MambaModel, model
from pallas_kernels.bench.first_call import FirstCall, first_call
from pallas_kernels.bench.measure import Bench, Row, WrongResultError
from pallas_kernels.bench.options import (
    add_output_options,
    add_run_options,
    check_output_options,
    config_from,
    option_of,
    vllm_from,
    write_outputs,
)
from pallas_kernels.bench.report import Reporter, environment, headline, record, same_workload, workload_key
from pallas_kernels.bench.workload import Workload
from pallas_kernels.config import KernelConfig

# Models, and the tensor-parallel degree at which one of their ranks fits a card.
MODELS_TP = (
    ("qwen3.5-9b", 1),
    ("nemotron-3-super-120b-a12b", 1),
    ("nemotron-3-ultra-550b-a55b", 4),
    ("kimi-k3", 8),
)
LAYOUTS = ("DS", "SD")
NUM_REQS = 128
NO_COPY_NUM_REQS = (1, 8, 32, 128, 256, 512)
FEW_CTAS = 32
# The smallest launch there is, for what a launch takes at least.
ALONE = KernelConfig(num_ctas=1, num_warpgroups=1)
# Copying requests of the two measurements that part what a copy takes from what a step takes.
_FEW_AND_MORE_COPYING = (1, 8)
FIRST_CALL_LAYERS = (12, 24, 48)
_MIB = 2**20
# Leaves room for what XLA and torch allocate besides.
_MEMORY_SHARE = 0.85


@dataclasses.dataclass(frozen=True)
class Value:
    """What was measured on a workload, on which, and what a copy at the limit would reach there, if that is known."""

    value: float
    where: str
    at_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Bar:
    """A demand on a run and how it was met.

    Attributes:
      name: what is demanded.
      wanted: the bound, for people.
      measured: the worst that was measured, for people; None where nothing was.
      where: on what that was.
      met: None where nothing was measured.
      missed: how many of the measurements miss the bound, of how many.
      out_of_reach: how many of those ask for more than the limit: an elementwise copy would miss them too.
    """

    name: str
    wanted: str
    measured: str | None
    where: str
    met: bool | None
    missed: tuple[int, int]
    out_of_reach: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the bars and returns the exit status: 1 when a result is wrong, bars missed or not."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench.bars",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_run_options(parser, iterations=12)
    for field in dataclasses.fields(KernelConfig):
        parser.add_argument(
            option_of(field.name, prefix="few_"),
            type=int,
            default=FEW_CTAS if field.name == "num_ctas" else None,
            help="the same where the kernel is held to few thread blocks",
        )
    parser.add_argument(
        "--copying",
        nargs="+",
        default=[0, 1, 8, 32, 128],
        type=int,
        choices=range(NUM_REQS + 1),
        metavar="N",
        help=f"how many of {NUM_REQS} requests copy",
    )
    add_output_options(parser)
    parser.add_argument("--judge", metavar="FILE", help="measure nothing, and judge what an earlier run wrote there")
    args = parser.parse_args(argv)
    check_output_options(parser, args)
    if args.judge:
        return _judge_file(args)
    on_gpu = jax.devices()[0].platform == "gpu"
    config, few = config_from(args), config_from(args, prefix="few_")
    if ALONE.num_ctas in (config.num_ctas, few.num_ctas):
        parser.error("one thread block is what the smallest launch is measured with: choose another number")
    vllm = vllm_from(parser, args)
    where = environment(vllm.version if vllm else None)
    reporter = Reporter()
    reporter.say(headline(where))
    bench = Bench(reporter, iterations=args.iterations, vllm=vllm)
    first_calls: list[FirstCall] = []
    status = 0
    try:
        if on_gpu:
            _measure_gpu(bench, config, few, args.copying, first_calls)
        else:
            _measure_cpu(bench)
    except WrongResultError as error:
        reporter.say(str(error))
        status = 1
    finally:  # What was measured until an interruption is not lost.
        # The bars of the kernel are no question without a GPU; on one, what was not measured is shown as open.
        bars = [bar for bar in judge(bench.rows, first_calls, few.num_ctas) if on_gpu or bar.met is not None]
        for line in (*bar_table(bars), *fixed_costs(bench.rows, few.num_ctas)):
            reporter.say(line)
        content = {
            "config": dataclasses.asdict(config),
            "few_ctas": dataclasses.asdict(few),
            "bars": [dataclasses.asdict(bar) for bar in bars],
            "first_calls": [dataclasses.asdict(call) for call in first_calls],
        }
        write_outputs(args, record(where, bench.rows, **content))
    return status


def _judge_file(args: argparse.Namespace) -> int:
    """Judges a record, and writes it where the outputs go."""
    content = json.loads(Path(args.judge).read_text())
    rows, few_ctas = [Row(**row) for row in content["rows"]], content["few_ctas"]["num_ctas"]
    bars = judge(rows, [FirstCall(**call) for call in content["first_calls"]], few_ctas)
    for line in (*bar_table(bars), *fixed_costs(rows, few_ctas)):
        print(line)
    write_outputs(args, content | {"bars": [dataclasses.asdict(bar) for bar in bars]})
    return 0


def _measure_gpu(
    bench: Bench, config: KernelConfig, few: KernelConfig, copying: Sequence[int], first_calls: list[FirstCall]
) -> None:
    """Measures what the bars on a GPU need."""
    original = ["vllm"] if bench.vllm else []
    timed = [*original, "limit", "mosaic_gpu"]
    qwen = model("qwen3.5-9b")

    def no_copy(num_reqs: int) -> Workload:
        return Workload(qwen, "DS", 1, "post", num_reqs, 0, 1)

    for stacked, layers in [*((False, layers) for layers in FIRST_CALL_LAYERS), (True, FIRST_CALL_LAYERS[-1])]:
        bench.reporter.progress(f"first call, {layers} layers")
        call = first_call(no_copy(NUM_REQS), layers, stacked=stacked, implementation="mosaic_gpu", config=config)
        first_calls.append(call)
        bench.reporter.say(str(call))
    for num_reqs in NO_COPY_NUM_REQS:
        bench.measure([no_copy(num_reqs)], timed, config)
        bench.measure([no_copy(num_reqs)], ["mosaic_gpu"], ALONE)
    for name, tp in MODELS_TP:
        for layout in LAYOUTS:
            bench.measure(list(_copies(bench, model(name), layout, tp, copying, NUM_REQS)), timed, config)
        bench.measure([Workload(model(name), "DS", tp, "post", NUM_REQS, 32, 1)], ["mosaic_gpu"], few)
    for kind, tp, num_reqs in ((model("lfm2-1.2b"), 1, 512), (conv_only(model("kimi-k3")), 8, 128)):
        for layout in LAYOUTS:
            bench.measure(list(_copies(bench, kind, layout, tp, (32, num_reqs), num_reqs)), timed, config)
    # Up to a quarter of the batch.
    batch = [Workload(qwen, "DS", 1, "post", NUM_REQS, num_copying, 1) for num_copying in (0, 1, 8, 32)]
    bench.measure(batch, ["xla", "idiom"], wall=True)


def _measure_cpu(bench: Bench) -> None:
    """Measures what the bar elsewhere needs: 48 pools, of which no block moves."""
    bench.measure([Workload(model("qwen3.5-9b"), "DS", 8, "post", NUM_REQS, 0, 1)], ["empty", "xla"])


def conv_only(kind: MambaModel) -> MambaModel:
    """Returns a model with the windows of `kind` and no temporal state."""
    return dataclasses.replace(kind, name=f"{kind.name}-conv", family="short_conv", temporal_shape=None)


def _copies(
    bench: Bench, kind: MambaModel, layout: str, tp: int, copying: Iterable[int], num_reqs: int
) -> Iterable[Workload]:
    """The workloads of a model that fit the card, at offsets 0, 1 and the largest."""
    stats = jax.devices()[0].memory_stats() or {}
    memory = _MEMORY_SHARE * stats.get("bytes_limit", float("inf"))
    for num_copying in copying:
        for offset in sorted({0, min(1, kind.num_spec), kind.num_spec}):
            workload = Workload(kind, layout, tp, "post", num_reqs, num_copying, offset)
            # Arrays become refs pool by pool, and the limit's operands are gone by then.
            needed = workload.pool_bytes + workload.pool_bytes // kind.num_layers, workload.bytes_moved * 3 // 2
            if max(needed) < memory:
                yield workload
            else:
                bench.reporter.say(f"{num_copying} copying requests of {kind.name} need too much memory: left out")


def judge(rows: Sequence[Row], first_calls: Sequence[FirstCall], few_ctas: int | None = FEW_CTAS) -> list[Bar]:
    """Holds measurements against the bars.

    Args:
      rows: measurements; what is missing leaves its bars open.
      first_calls: likewise.
      few_ctas: thread blocks that mark the measurements with few of them.

    Returns:
      The bars, one for each demand and, where it concerns them, model and layout.
    """
    ours = _unhindered(rows, few_ctas)
    bars = [
        _bar(
            "no request copies",
            [Value(row.seconds * 1e6, _where(row, f"{row.num_reqs} requests")) for row in ours if not row.copying],
            at_most=2.0,
            unit=" us",
        ),
        _bar(
            f"no request of {NUM_REQS} copies, vLLM's time over ours",
            _ratios(rows, ours, "vllm", lambda row: not row.copying and row.num_reqs == NUM_REQS),
            at_least=20.0,
            unit="x",
        ),
        _bar("any batch, vLLM's time over ours", _ratios(rows, ours, "vllm", lambda row: True), 1.0, unit="x"),
    ]
    hybrid = [row for row in ours if not row.conv_only]
    for name, layout in dict.fromkeys((row.model, row.layout) for row in hybrid if row.copying):
        these = [row for row in hybrid if (row.model, row.layout) == (name, layout)]
        title = f"{name} {layout}"
        one = _ratios(rows, these, "vllm", lambda row: row.copying == 1 and row.num_reqs == NUM_REQS)
        many = _ratios(rows, these, "vllm", lambda row: row.copying >= 8)
        full = _ratios(rows, these, "limit", lambda row: row.bytes >= 256 * _MIB)
        bars += [
            _bar(f"{title}, 1 of {NUM_REQS} copies, vLLM's time over ours", one, 1.3, unit="x"),
            _bar(f"{title}, 8 or more copy, vLLM's time over ours", many, 1.25, unit="x"),
            _bar(f"{title}, 256 MiB or more, share of the limit", full, 0.93),
        ]
    conv = _ratios(rows, ours, "limit", lambda row: row.conv_only and row.bytes >= 64 * _MIB)
    bars.append(_bar("conv only, 64 MiB or more, share of the limit", conv, 0.80))
    few = [row for row in rows if row.contender == "mosaic_gpu" and row.num_ctas == few_ctas]
    unhindered = {workload_key(row): row.seconds for row in ours}
    slowed = [
        Value(unhindered[workload_key(row)] / row.seconds, _where(row))
        for row in few
        if workload_key(row) in unhindered
    ]
    return [
        *bars,
        _bar(f"{few_ctas} thread blocks, share of full speed", slowed, 0.60),
        *_first_call_bars(first_calls),
        *_xla_bars(rows),
    ]


def _unhindered(rows: Sequence[Row], few_ctas: int | None) -> list[Row]:
    """Our kernel on as many thread blocks as it likes."""
    return [row for row in rows if row.contender == "mosaic_gpu" and row.num_ctas not in (few_ctas, ALONE.num_ctas)]


def _first_call_bars(calls: Sequence[FirstCall]) -> list[Bar]:
    most = FIRST_CALL_LAYERS[-1]
    apart = {call.num_layers: call.seconds for call in calls if not call.stacked}
    stacked = [Value(call.seconds, f"{call.num_layers} layers") for call in calls if call.stacked]
    # Twice the layers may take twice the time, and a tenth more for the clock's sake.
    growth = [Value(apart[n] / apart[n // 2], f"{n // 2} to {n} layers") for n in sorted(apart) if n // 2 in apart]
    return [
        _bar(
            f"first call, {most} layers of separate arrays",
            [Value(apart[most], "")] if most in apart else [],
            at_most=8.0,
            unit=" s",
        ),
        _bar("first call, growth with twice the layers", growth, at_most=2.2, unit="x"),
        _bar("first call, stacked", stacked, at_most=3.0, unit=" s"),
    ]


def _xla_bars(rows: Sequence[Row]) -> list[Bar]:
    xla = [row for row in rows if row.contender == "xla"]
    bars = []
    for clock, title in (("seconds", "time"), ("wall_seconds", "wall time")):
        few = _ratios(rows, xla, "idiom", lambda row: 0 < row.copying <= row.num_reqs // 4, clock)
        none = _ratios(rows, xla, "idiom", lambda row: not row.copying, clock)
        bars += [
            _bar(f"XLA, no request copies, the idiom's {title} over ours", none, 10.0, unit="x"),
            _bar(f"XLA, up to a quarter copy, the idiom's {title} over ours", few, 1.0, unit="x"),
        ]
    empty = [Value(1 / of.value, of.where) for of in _ratios(rows, xla, "empty", lambda row: not row.copying)]
    if empty:  # A bar for CPUs.
        bars.append(_bar("XLA, no request copies, our time over an empty call's", empty, at_most=3.0, unit="x"))
    return bars


def _ratios(
    rows: Sequence[Row], ours: Iterable[Row], other: str, wanted: Callable[[Row], bool], clock: str = "seconds"
) -> list[Value]:
    """Returns the other's time over ours wherever both were measured."""
    ratios = []
    for row in filter(wanted, ours):
        theirs, limit = same_workload(rows, row, other), same_workload(rows, row, "limit")
        if theirs and getattr(row, clock) and getattr(theirs, clock):
            at_limit = getattr(theirs, clock) / getattr(limit, clock) if limit and getattr(limit, clock) else None
            ratios.append(Value(getattr(theirs, clock) / getattr(row, clock), _where(row), at_limit))
    return ratios


def _bar(
    name: str,
    values: Sequence[Value],
    at_least: float | None = None,
    at_most: float | None = None,
    unit: str = "",
) -> Bar:
    """Holds the worst of `values` against a bound."""

    def text(value: float) -> str:
        return f"{value:.1%}" if not unit else f"{value:.2f}{unit}"

    if at_least is not None:
        wanted, misses, worst_of = f">= {text(at_least)}", [v for v in values if v.value < at_least], min
        out_of_reach = sum(v.at_limit is not None and v.at_limit < at_least for v in misses)
    else:
        assert at_most is not None
        wanted, misses, worst_of = f"<= {text(at_most)}", [v for v in values if v.value > at_most], max
        out_of_reach = 0
    if not values:
        return Bar(name, wanted, None, "", None, (0, 0), 0)
    worst = worst_of(values, key=lambda v: v.value)
    return Bar(name, wanted, text(worst.value), worst.where, not misses, (len(misses), len(values)), out_of_reach)


def _where(row: Row, detail: str | None = None) -> str:
    return f"{row.model} {row.layout}, {detail or f'{row.copying} of {row.num_reqs} copy, offset {row.offset}'}"


def bar_table(bars: Sequence[Bar]) -> Iterable[str]:
    """Yields the lines of a table of the bars."""
    width = max((len(bar.name) for bar in bars), default=0)
    yield f"\n{'bar':<{width}} {'wanted':>10} {'measured':>10}  {'met':<16} {'no copy could':<14} worst on"
    for bar in bars:
        missed, of = bar.missed
        met = {True: "met", False: f"MISSED {missed} of {of}", None: "not measured"}[bar.met]
        measured, beyond = bar.measured or "-", bar.out_of_reach or ""
        yield f"{bar.name:<{width}} {bar.wanted:>10} {measured:>10}  {met:<16} {beyond:<14} {bar.where}".rstrip()


def fixed_costs(rows: Sequence[Row], few_ctas: int | None = FEW_CTAS) -> Iterable[str]:
    """Yields lines that say what keeps our kernel from the bounds: a launch, and what a step takes beside its copies.

    Args:
      rows: measurements.
      few_ctas: thread blocks that mark the measurements with few of them.
    """
    ours = _unhindered(rows, few_ctas)
    for alone in (row for row in rows if row.contender == "mosaic_gpu" and row.num_ctas == ALONE.num_ctas):
        row = next((row for row in ours if workload_key(row) == workload_key(alone)), None)
        if row:
            yield (
                f"{_where(row, f'{row.num_reqs} requests')}: a launch takes {alone.seconds * 1e6:.2f} us with one "
                f"warpgroup in all, {row.seconds * 1e6:.2f} us with the grid that copies fastest"
            )
    few, more = _FEW_AND_MORE_COPYING
    for row in (row for row in ours if row.copying == more and not row.conv_only):
        fewer = dataclasses.replace(row, copying=few)
        less = next((other for other in ours if workload_key(other) == workload_key(fewer)), None)
        limits = [same_workload(rows, of, "limit") for of in (fewer, row)]
        if less and all(limits):
            each, limit_each = ((b.seconds - a.seconds) / (more - few) for a, b in ((less, row), limits))
            fixed, limit_fixed = less.seconds - few * each, limits[0].seconds - few * limit_each
            yield (
                f"{_where(row, f'offset {row.offset}')}: a step takes {fixed * 1e6:.1f} us (the limit "
                f"{limit_fixed * 1e6:.1f} us), and {each * 1e6:.2f} us more for each request that copies, which is "
                f"{limit_each / each:.1%} of the limit's speed"
            )


if __name__ == "__main__":
    sys.exit(main())
