"""Verifies and times one or more operations on the states of models."""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from layouts import MODELS, model
from pallas_kernels.bench.contenders import CONTENDERS, OPERATIONS
from pallas_kernels.bench.measure import Bench, WrongResultError
from pallas_kernels.bench.report import Reporter, environment, headline, record
from pallas_kernels.bench.vllm import VllmKernels, VllmUnavailableError, load_kernels
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
    if args.json:
        write_json(args.json, record(where, bench.rows, config=dataclasses.asdict(config)))
    return 0


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how to measure, not what."""
    parser.add_argument(
        "--vllm",
        metavar="PATH",
        help="vLLM's package folder, wheel, or the one file vllm/v1/worker/mamba_utils.py (as of 0.33), with Triton "
        "and torch installed; its kernels cover postprocess and preprocess",
    )
    parser.add_argument("--iterations", default=20, type=_count, help="calls to take the median of")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    for field in dataclasses.fields(KernelConfig):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help="see KernelConfig")


def config_from(args: argparse.Namespace) -> KernelConfig:
    """Returns the tuning knobs that the command line sets."""
    names = [field.name for field in dataclasses.fields(KernelConfig)]
    return KernelConfig(**{name: value for name in names if (value := getattr(args, name)) is not None})


def vllm_from(parser: argparse.ArgumentParser, args: argparse.Namespace) -> VllmKernels | None:
    """Returns the kernels that `--vllm` names; ends the program when they cannot be had."""
    if args.vllm is None:
        return None
    if jax.devices()[0].platform != "gpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--vllm needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1) to check results without one")
    try:
        return load_kernels(args.vllm)
    except VllmUnavailableError as error:
        parser.error(str(error))


def write_json(file: str, content: object) -> None:
    """Writes a record."""
    Path(file).write_text(json.dumps(content, indent=1) + "\n")


def _count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("a median needs at least 2")
    return value


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
    add_run_options(parser)
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, vllm: VllmKernels | None) -> None:
    """Refuses what cannot be measured, and fills in what depends on other options."""
    device = jax.devices()[0]
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
