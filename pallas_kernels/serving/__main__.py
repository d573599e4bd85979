"""Serves a few requests with speculation and a prefix cache, and checks every token against plain decoding.

With --report, measures four modes instead. The exit status is 1 when a token differs.
"""

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench.timing import METHODS
from pallas_kernels.selection import IMPLEMENTATIONS, MOSAIC_GPU, select_implementation
from pallas_kernels.serving.copies import TENSOR_AXIS, FusedCopies
from pallas_kernels.serving.engine import Engine
from pallas_kernels.serving.mamba2 import SIZES, Mamba2
from pallas_kernels.serving.reference import Decoded, agrees
from pallas_kernels.serving.report import (
    RESULT_HEADER,
    WORKLOADS,
    Mode,
    Workload,
    decode_workload,
    make_engine,
    make_modes,
    measure,
    print_ratios,
    result_line,
    serve,
)

# Under tensor parallelism sums are split, so that logits differ in their last bits from those of one device.
_TP_TOLERANCE = 1e-3

# Options that change the workload of a model size.
_SIZES_OF_WORKLOAD = {
    "num_requests": "requests",
    "shared": "tokens that all prompts start with",
    "own": "tokens of a prompt that follow",
    "output": "tokens to generate for a request",
    "batch": "rows of the engine",
    "block_size": "tokens per block",
    "num_spec": "drafts per step",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo or the report, and returns its exit status."""
    args = _parse(argv)
    workload = dataclasses.replace(
        WORKLOADS[args.model],
        drafter=args.drafter,
        **{name: value for name in _SIZES_OF_WORKLOAD if (value := getattr(args, name)) is not None},
    )
    mesh = None
    if args.tp > 1:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((args.tp,), (TENSOR_AXIS,), axis_types=auto, devices=jax.devices()[: args.tp])
    copies = FusedCopies(args.implementation, mesh=mesh)
    tolerance = _TP_TOLERANCE if mesh else 0.0
    device = jax.devices()[0].device_kind
    print(f"Mamba-2 {args.model}, random weights, {args.conv_layout}, TP {args.tp}, on {device}, JAX {jax.__version__}")
    print(
        f"{workload.num_requests} requests of {workload.shared} shared and {workload.own} own tokens, "
        f"{workload.output} to generate, in {workload.batch} rows\n"
        f"blocks of {workload.block_size} tokens, {workload.num_spec} drafts ({workload.drafter})"
    )
    model, weights = Mamba2.random(args.model)
    want = decode_workload(model, weights, workload)

    def build(mode: Mode) -> Engine:
        return make_engine(model, weights, mode, workload, want, conv_layout=args.conv_layout, mesh=mesh)

    modes = [mode for mode in make_modes(copies) if not args.modes or mode.name in args.modes]
    engine = build(modes[0])
    selection = select_implementation(engine.states, conv_layout=args.conv_layout, implementation=args.implementation)
    print(f"implementation: {selection.name} ({selection.reason})")
    if args.report:
        results, right = [], True
        print(RESULT_HEADER)
        for mode in modes:
            result, is_right = measure(build, mode, workload, want, tolerance=tolerance)
            print(result_line(result), flush=True)
            results.append(result)
            right &= is_right
        print_ratios(results)
        record: dict[str, Any] = {"modes": [dataclasses.asdict(result) for result in results]}
    else:
        right = _demo(engine, workload, want, tolerance)
        record = {"stats": dataclasses.asdict(engine.stats)}
    if args.json:
        platform = jax.devices()[0].platform
        record |= {
            "model": args.model,
            "workload": dataclasses.asdict(workload),
            "right": right,
            "conv_layout": args.conv_layout,
            "implementation": selection.name,
            "tp": args.tp,
            "device": device,
            "jax": jax.__version__,
            "date": str(datetime.date.today()),
            "copy_cost_method": METHODS.get(platform, METHODS["cpu"]),
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    forgiven = f" (a first difference is forgiven where two logits lie within {tolerance:g})" if tolerance else ""
    verdict = "OK, all tokens are" if right else "WRONG, some tokens are not"
    print(f"verdict: {verdict} those of plain decoding{forgiven}")
    return 0 if right else 1


def _demo(engine: Engine, workload: Workload, want: Sequence[Decoded], tolerance: float) -> bool:
    """Serves the workload once, prints a line per request, and returns whether all tokens are right."""
    requests = serve(engine, workload.prompts(engine.model.vocab_size), workload.output, on_step=lambda _: None)
    right = [agrees(request.output, truth, tolerance) for request, truth in zip(requests, want, strict=True)]
    print(f"\n{'request':>7} {'prompt':>7} {'cached':>7}  {'output':<40} as plain decoding")
    for request, is_right in zip(requests, right, strict=True):
        tokens = " ".join(map(str, request.output[:10])) + " ..."
        answer = "yes" if is_right else "NO"
        print(f"{request.request_id:>7} {request.num_prompt:>7} {request.num_cached:>7}  {tokens:<40} {answer}")
    stats = engine.stats
    print(
        f"\n{stats.num_output} tokens in {stats.num_steps} steps; {stats.hit_rate:.0%} of the prompt tokens came from "
        f"the prefix cache; a window yielded {stats.accepted_length:.2f} tokens"
    )
    return all(right)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.serving", description=__doc__)
    parser.add_argument("--model", default="tiny", choices=SIZES, help="size of the model; 130m is meant for a GPU")
    parser.add_argument("--conv-layout", default="DS", choices=["DS", "SD"], help="layout of the conv states")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="default: the kernel where it can run")
    parser.add_argument("--tp", default=1, type=int, metavar="N", help="devices to spread the model over")
    parser.add_argument("--report", action="store_true", help="measure the modes and compare them")
    modes = [mode.name for mode in make_modes(FusedCopies())]
    parser.add_argument("--modes", nargs="+", choices=modes, metavar="MODE", help=f"of the report: {', '.join(modes)}")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument(
        "--drafter",
        default="scripted",
        choices=["scripted", "ngram"],
        help="scripted: right guesses, spoilt so that 1, 2, ... tokens are accepted in turn; ngram: prompt lookup",
    )
    for name, text in _SIZES_OF_WORKLOAD.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    args = parser.parse_args(argv)
    devices = jax.devices()
    if args.implementation == MOSAIC_GPU and devices[0].platform != "gpu":
        parser.error(
            f"--implementation {MOSAIC_GPU} needs a GPU, and the first device here is {devices[0].device_kind}"
        )
    if not 1 <= args.tp <= len(devices):
        parser.error(f"--tp must lie in 1..{len(devices)}, the devices here, got {args.tp}")
    for name in _SIZES_OF_WORKLOAD:
        value = getattr(args, name)
        if value is not None and value < (0 if name in ("shared", "num_spec") else 1):
            parser.error(f"--{name.replace('_', '-')} is too small: {value}")
    return args


if __name__ == "__main__":
    sys.exit(main())
