"""Times one operation on a model's states, for several numbers of copying requests."""

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from layouts import MODELS, model
from pallas_kernels.bench.contenders import NAMES, OPERATIONS, make_limit, make_step
from pallas_kernels.bench.timing import METHODS, median_seconds
from pallas_kernels.bench.workload import Workload
from pallas_kernels.config import KernelConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status: 1 when a contender gives a wrong result."""
    args = _parse(argv)
    device = jax.devices()[0]
    config = KernelConfig(
        **{name: value for name in ("num_ctas", "ctas_per_sm", "stage_bytes") if (value := getattr(args, name))}
    )
    method = METHODS.get(device.platform, METHODS["cpu"])
    print(f"{device.device_kind}, JAX {jax.__version__}, {datetime.date.today()}; {method} of {args.iterations}")
    rows, status = [], 0
    for name in args.models:
        for layout in args.layouts:
            status |= _bench_model(name, layout, args, config, rows)
    if args.json:
        record = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "date": str(datetime.date.today()),
            "method": method,
            "config": dataclasses.asdict(config),
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["qwen3.5-9b"], choices=MODELS, metavar="NAME")
    parser.add_argument("--layouts", nargs="+", default=["DS"], choices=["DS", "SD"])
    parser.add_argument("--operation", default="post", choices=OPERATIONS, help="postprocess, preprocess or copy")
    parser.add_argument("--tp", default=1, type=int, help="tensor-parallel degree")
    parser.add_argument("--num-reqs", default=128, type=int, help="requests in the batch")
    parser.add_argument("--copying", nargs="+", default=[0, 1, 8, 32], type=int, help="how many of them copy")
    parser.add_argument("--offset", default=1, type=int, help="tokens by which windows shift")
    on_gpu = jax.devices()[0].platform == "gpu"
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["mosaic_gpu" if on_gpu else "xla", "limit"],
        choices=NAMES,
        help="idiom: gathers and scatters of the whole batch; limit: an elementwise pass over as many bytes",
    )
    parser.add_argument("--iterations", default=20, type=int, help="calls to take the median of")
    for name in ("num-ctas", "ctas-per-sm", "stage-bytes"):
        parser.add_argument(f"--{name}", type=int, help="see KernelConfig")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    if max(args.copying) > args.num_reqs or min(args.copying) < 0:
        parser.error(f"--copying must lie in 0..--num-reqs = {args.num_reqs}, got {args.copying}")
    if "mosaic_gpu" in args.contenders and not on_gpu:
        parser.error(
            f"the contender mosaic_gpu needs a GPU, and the first device here is {jax.devices()[0].device_kind}"
        )
    return args


def _bench_model(
    name: str, layout: str, args: argparse.Namespace, config: KernelConfig, rows: list[dict[str, Any]]
) -> int:
    """Verifies and times every contender on one model; appends to `rows` and returns the exit status."""
    most = Workload(model(name), layout, args.tp, args.operation, args.num_reqs, max(args.copying), args.offset)
    print(f"\n{name}, {layout}, {args.operation}, TP {args.tp}, offset {args.offset}, {args.num_reqs} requests")
    print(f"{'copying':>8} {'contender':>12} {'time us':>12} {'GB/s':>8} {'of limit':>8} {'kernels':>8}")
    for contender in args.contenders:
        if contender != "limit" and not _is_right(contender, most, config):
            print(f"{contender} gives a WRONG result")
            return 1
    states = most.states()
    for num_copying in args.copying:
        workload = dataclasses.replace(most, num_copying=num_copying)
        limit = None
        for contender in sorted(args.contenders, key=lambda contender: contender != "limit"):
            if contender == "limit":
                step, *operands = make_limit(workload)
            else:
                step, operands = make_step(contender, workload, config), [states, *workload.arguments()]
            seconds, kernels = median_seconds(step, *operands, iterations=args.iterations)
            limit = seconds if contender == "limit" else limit
            speed = workload.bytes_moved / seconds / 1e9
            share = f"{limit / seconds:.1%}" if limit and num_copying else "-"
            print(
                f"{num_copying:>8} {contender:>12} {seconds * 1e6:>12.2f} {speed:>8.0f} {share:>8} {kernels:>8}",
                flush=True,
            )
            rows.append(
                {
                    "model": name,
                    "layout": layout,
                    "operation": args.operation,
                    "tp": args.tp,
                    "offset": args.offset,
                    "num_reqs": args.num_reqs,
                    "copying": num_copying,
                    "contender": contender,
                    "seconds": seconds,
                    "bytes": workload.bytes_moved,
                    "kernels": kernels,
                }
            )
    return 0


def _is_right(contender: str, workload: Workload, config: KernelConfig) -> bool:
    """Compares every byte of two layers, and of up to four copying requests, with the oracle."""
    small = dataclasses.replace(workload, num_copying=min(workload.num_copying, 4))
    states, arguments = small.states(num_layers=2), small.arguments()
    before = jax.tree.map(lambda ref: np.asarray(ref[...]), states)
    make_step(contender, small, config)(states, *arguments)
    reference = OPERATIONS[small.operation][1](before, *jax.tree.map(np.asarray, arguments), **small.static_options)
    want = jax.tree.leaves(reference if small.operation == "copy" else reference[0])
    got = [np.asarray(ref[...]) for ref in jax.tree.leaves(states)]
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(got, want, strict=True))


if __name__ == "__main__":
    sys.exit(main())
