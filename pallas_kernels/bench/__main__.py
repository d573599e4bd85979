"""Verifies and times one or more operations on the states of models."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence

import jax

from layouts import MODELS, model
from pallas_kernels.bench.contenders import CONTENDERS, OPERATIONS
from pallas_kernels.bench.first_call import first_call
from pallas_kernels.bench.measure import Bench, WrongResultError
from pallas_kernels.bench.options import (
    add_output_options,
    add_run_options,
    check_output_options,
    config_from,
    vllm_from,
    write_outputs,
)
from pallas_kernels.bench.report import Reporter, environment, headline, record
from pallas_kernels.bench.vllm import VllmKernels
from pallas_kernels.bench.workload import Workload
from pallas_kernels.config import KernelConfig

PUBLISHED_MODELS = ("qwen3.5-9b", "nemotron-3-super-120b-a12b")
_PUBLISHED_NUM_REQS = (1, 2, 4, 8, 16, 32, 64, 128)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status: 1 when a contender gives a wrong result."""
    parser = _parser()
    args = parser.parse_args(argv)
    config = config_from(args)
    vllm = vllm_from(parser, args)
    _check(parser, args, vllm)
    if args.first_call:
        return _first_calls(args, config)
    groups = [list(group) for group in _workloads(args)]
    reporter = Reporter(sum(len(group) for group in groups) * len(args.contenders))
    where = environment(vllm.version if vllm else None)
    reporter.say(headline(where))
    bench = Bench(reporter, iterations=args.iterations, vllm=vllm)
    try:
        for group in groups:
            bench.measure(group, args.contenders, config)
    except WrongResultError as error:
        reporter.say(str(error))
        return 1
    finally:
        reporter.clear()
    write_outputs(args, record(where, bench.rows, config=dataclasses.asdict(config)))
    return 0


def _first_calls(args: argparse.Namespace, config: KernelConfig) -> int:
    """Times first calls instead of steps."""
    where = environment()
    print(headline(where | {"method": "seconds on the host"}))
    calls = []
    names = [name for name in args.contenders if name in ("mosaic_gpu", "xla")]
    for name, layout, implementation in itertools.product(args.models, args.layouts, names):
        workload = Workload(model(name), layout, args.tp, args.operation[0], args.num_reqs[0], 0, 1)
        for num_layers, stacked in itertools.product(args.layers or [workload.model.num_layers], (False, True)):
            call = first_call(workload, num_layers, stacked=stacked, implementation=implementation, config=config)
            calls.append(call)
            print(f"{name}, {layout}: {call}", flush=True)
    first_calls = [dataclasses.asdict(call) for call in calls]
    write_outputs(args, record(where, [], config=dataclasses.asdict(config), first_calls=first_calls))
    return 0


def _offset(text: str) -> int | None:
    """A number of tokens, or None for "max"."""
    return None if text == "max" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    on_gpu = jax.devices()[0].platform == "gpu"
    parser.add_argument("--models", nargs="+", default=["qwen3.5-9b"], choices=MODELS, metavar="NAME")
    parser.add_argument("--layouts", nargs="+", default=["DS"], choices=["DS", "SD"])
    parser.add_argument(
        "--operation", nargs="+", default=["post"], choices=OPERATIONS, help="postprocess, preprocess or copy"
    )
    parser.add_argument("--tp", default=1, type=int, help="tensor-parallel degree")
    parser.add_argument("--num-reqs", nargs="+", default=[128], type=int, help="requests in the batch")
    parser.add_argument("--copying", nargs="+", default=[0, 1, 8, 32], type=int, help="how many of them copy")
    parser.add_argument(
        "--offsets",
        nargs="+",
        default=[1],
        type=_offset,
        help="tokens by which windows shift; max: as many as the model has draft tokens",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help=f"as in vLLM's pull requests 48110 and 49436: all of {_PUBLISHED_NUM_REQS[0]} to "
        f"{_PUBLISHED_NUM_REQS[-1]} requests copy block 2i to 2i+1 without a shift; {' and '.join(PUBLISHED_MODELS)}",
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        help="; ".join(f"{name}: {meaning}" for name, meaning in CONTENDERS.items())
        + f" (default: {'mosaic_gpu' if on_gpu else 'xla'}, limit, and vllm where --vllm says where it is)",
    )
    parser.add_argument(
        "--first-call",
        action="store_true",
        help="instead, the seconds to trace, lower and compile our step, with separate arrays and with stacked ones",
    )
    parser.add_argument("--layers", nargs="+", type=int, help="layers of a first call; without it, the model's own")
    add_run_options(parser, iterations=20)
    add_output_options(parser)
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, vllm: VllmKernels | None) -> None:
    """Refuses what cannot be measured, and fills in what depends on other options."""
    check_output_options(parser, args)
    device = jax.devices()[0]
    if args.first_call and args.plot:
        parser.error("--plot draws times of steps, which --first-call does not measure")
    if args.contenders is None:
        args.contenders = [*(["vllm"] if vllm else []), "limit", "mosaic_gpu" if device.platform == "gpu" else "xla"]
    if "mosaic_gpu" in args.contenders and device.platform != "gpu":
        parser.error(f"the contender mosaic_gpu needs a GPU, and the first device here is {device.device_kind}")
    if "vllm" in args.contenders:
        if vllm is None:
            parser.error("the contender vllm needs --vllm PATH: this project does not bring vLLM along")
        if missing := [operation for operation in args.operation if operation not in vllm.operations]:
            parser.error(f"vLLM has no kernel for --operation {missing[0]}, only for {', '.join(vllm.operations)}")
    if args.published:
        args.models, args.num_reqs, args.offsets = list(PUBLISHED_MODELS), list(_PUBLISHED_NUM_REQS), [0]
    elif max(args.copying) > min(args.num_reqs) or min(args.copying) < 0:
        parser.error(f"--copying must lie in 0..--num-reqs = {min(args.num_reqs)}, got {args.copying}")
    for name in args.models:
        for offset in args.offsets:
            if offset is not None and not 0 <= offset < model(name).state_len:
                parser.error(f"--offsets must lie in 0..{model(name).state_len - 1} for {name}, got {offset}")


def _workloads(args: argparse.Namespace) -> Iterable[Iterable[Workload]]:
    """The workloads in groups that share their pools."""
    for name, layout in itertools.product(args.models, args.layouts):
        kind = model(name)
        offsets = dict.fromkeys(kind.num_spec if offset is None else offset for offset in args.offsets)
        cases = itertools.product(args.operation, offsets, args.num_reqs)
        yield [
            Workload(kind, layout, args.tp, operation, num_reqs, num_copying, offset, args.published)
            for operation, offset, num_reqs in cases
            for num_copying in ([num_reqs] if args.published else args.copying)
        ]


if __name__ == "__main__":
    sys.exit(main())
