"""The command-line options that the programs of this package share."""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench.vllm import VllmKernels, VllmUnavailableError, load_kernels
from pallas_kernels.config import KernelConfig


def add_run_options(parser: argparse.ArgumentParser, *, iterations: int) -> None:
    """Adds the options that say how to measure, not what."""
    parser.add_argument(
        "--vllm",
        metavar="PATH",
        help="vLLM's package folder, wheel, or the one file vllm/v1/worker/mamba_utils.py (as of 0.33), with Triton "
        "and torch installed; its kernels cover postprocess and preprocess",
    )
    parser.add_argument("--iterations", default=iterations, type=_count, help="calls to take the median of")
    for field in dataclasses.fields(KernelConfig):
        parser.add_argument(option_of(field.name), type=int, help="see KernelConfig")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where the results go."""
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw them there; needs the extra 'plot'")


def option_of(name: str, prefix: str = "") -> str:
    """The option that sets a field of `KernelConfig`."""
    return f"--{prefix}{name}".replace("_", "-")


def config_from(args: argparse.Namespace, prefix: str = "") -> KernelConfig:
    """Returns the tuning knobs that the command line sets."""
    names = [field.name for field in dataclasses.fields(KernelConfig)]
    return KernelConfig(**{name: value for name in names if (value := getattr(args, prefix + name)) is not None})


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


def check_output_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program before it measures what it could not write."""
    for file in (args.json, args.plot):
        if file and not Path(file).resolve().parent.is_dir():
            parser.error(f"the folder of {file} does not exist")
    if args.plot:
        try:
            import pallas_kernels.bench.plot  # noqa: F401
        except ModuleNotFoundError as error:
            parser.error(f"--plot: {error}")


def write_outputs(args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Writes a record where the options say."""
    if args.json:
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        from pallas_kernels.bench.plot import save

        save(content, args.plot)


def _count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("a median needs at least 2")
    return value
