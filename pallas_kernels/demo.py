"""One speculative step of a real model's Mamba states, checked byte for byte against the oracle.

`python -m pallas_kernels.demo --help` lists the options. The exit status is 1 when a byte differs.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layouts import MODELS, LayerStateShapes, MambaModel, MambaState, RowStep, StateShape, model, row_steps
from pallas_kernels.inputs import PostprocessInputs
from pallas_kernels.selection import IMPLEMENTATIONS, MOSAIC_GPU, select_implementation
from pallas_kernels.state_copy import postprocess_mamba
from pallas_kernels.state_copy_ref import postprocess_mamba_ref

_BLOCK_SIZE = 1056
_COLUMNS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3.5-9b", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--layout", default="DS", choices=["DS", "SD"], help="layout of the conv states")
    parser.add_argument("--num-reqs", default=4, type=int, metavar="N", help="requests in the batch")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="default: the kernel where it can run")
    args = parser.parse_args(argv)
    if args.num_reqs < 1:
        parser.error(f"--num-reqs must be positive, got {args.num_reqs}")

    device = jax.devices()[0]
    if args.implementation == MOSAIC_GPU and device.platform != "gpu":
        parser.error(f"--implementation {MOSAIC_GPU} needs a GPU, and the first device here is {device.device_kind}")

    entry = model(args.model)
    print(f"{entry}: {entry.num_layers} layers, {args.layout} layout, on {device.device_kind}")
    agrees = _run_step(
        entry, args.layout, args.num_reqs, num_layers=entry.num_layers, tp=1, implementation=args.implementation
    )
    if device.platform == "cpu":
        print("\nThe kernel in the Pallas GPU interpreter, with race detection, on one layer of one of 8 ranks:")
        agrees &= _run_step(entry, args.layout, args.num_reqs, num_layers=1, tp=8, implementation=None, interpret=True)
    return 0 if agrees else 1


def _run_step(
    entry: MambaModel,
    layout: str,
    num_reqs: int,
    *,
    num_layers: int,
    tp: int,
    implementation: str | None,
    interpret: bool = False,
) -> bool:
    """Seeds pools, runs one step, prints what happened, and returns whether every byte is right."""
    shapes = entry.state_shapes(tp, conv_layout=layout)
    num_blocks = 1 + num_reqs * _COLUMNS
    rng = np.random.default_rng(0)

    def pool(block: StateShape) -> jax.Array:
        return _random_pool(rng, num_blocks, block)

    states = [
        MambaState(conv=jax.tree.map(pool, shapes.conv), temporal=jax.tree.map(pool, shapes.temporal))
        for _ in range(num_layers)
    ]
    inputs = _requests(num_reqs, entry.num_spec)
    tables = 1 + np.arange(num_reqs * _COLUMNS, dtype=np.int32).reshape(num_reqs, _COLUMNS)
    pools = jax.tree.leaves(states)
    mib = sum(leaf.nbytes for leaf in pools) / 2**20
    print(f"{num_blocks} blocks of {_BLOCK_SIZE} tokens, {mib:.0f} MiB of state in {len(pools)} pools")

    options = {"block_size": _BLOCK_SIZE, "conv_layout": layout}
    want_states, want_counter = postprocess_mamba_ref(states, inputs, tables, **options)
    steps = list(row_steps(inputs, batch=num_reqs, block_size=_BLOCK_SIZE))
    _print_requests(inputs, tables, steps)
    moved = _bytes_moved(shapes, steps, state_len=entry.state_len) * num_layers
    print(f"bytes moved: {moved} ({moved / 2**20:.1f} MiB)")

    if interpret:
        print("implementation: mosaic_gpu, interpreted")
    else:
        selection = select_implementation(states, conv_layout=layout, implementation=implementation)
        implementation = selection.name
        print(f"implementation: {selection.name} ({selection.reason})")

    def step(states: Any, inputs: PostprocessInputs, tables: jax.Array) -> Any:
        return postprocess_mamba(states, inputs, tables, implementation=implementation, interpret=interpret, **options)

    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(states, inputs, tables).compile()
    compile_seconds = time.perf_counter() - start
    inputs, tables = jax.device_put((inputs, tables))
    start = time.perf_counter()
    got_states, got_counter = jax.block_until_ready(compiled(states, inputs, tables))
    seconds = time.perf_counter() - start
    what = "first launch included" if implementation == MOSAIC_GPU else "one call"
    print(f"time: {seconds * 1e3:.2f} ms ({what}), after {compile_seconds:.1f} s of compilation")
    return _print_verdict(want_states, want_counter, got_states, got_counter)


def _random_pool(rng: np.random.Generator, num_blocks: int, block: StateShape) -> jax.Array:
    """A pool of random bits, NaN patterns included."""
    bits = np.frombuffer(rng.bytes(num_blocks * block.num_bytes), block.dtype)
    return jnp.array(bits.reshape(num_blocks, *block.shape))


def _requests(num_reqs: int, num_spec: int) -> PostprocessInputs:
    """Requests that stand in turn just before a boundary (twice), nowhere near one, and exactly on one."""
    accepted = min(2, num_spec + 1)
    kind = np.arange(num_reqs) % 4
    certain = _BLOCK_SIZE + 1 - accepted  # so that the accepted tokens end on the boundary
    running = np.select([kind == 2, kind == 3], [certain - 100, _BLOCK_SIZE], certain)
    vectors = {
        # The running state lies behind the boundary for every fourth request, in its block for the others.
        "mamba_state_idx": np.where(kind == 0, 1, 0),
        "num_accepted_tokens": np.full(num_reqs, accepted),
        "num_computed_tokens": running - 1,
        "num_scheduled_tokens": np.full(num_reqs, 1 + num_spec),
        "num_draft_tokens": np.full(num_reqs, num_spec),
    }
    return PostprocessInputs(**{name: vector.astype(np.int32) for name, vector in vectors.items()})


def _print_requests(inputs: PostprocessInputs, tables: np.ndarray, steps: Sequence[RowStep]) -> None:
    """Prints the first requests, each with what the step does for it."""
    shown = 12
    print(f"\n{'request':>7}  {'accepted':>8}  {'boundary':>8}  {'offset':>6}  {'conv':>8}  {'temporal':>8}  counter")
    for step in steps[:shown]:
        row, accepted = step.row, inputs.num_accepted_tokens[step.row]
        boundary, offset = ((step.dst_col + 1) * _BLOCK_SIZE, step.offset) if step.crosses else ("-", "-")
        conv, temporal = (
            f"{tables[row, column]}->{tables[row, step.dst_col]}" if step.copies else "-"
            for column in (step.conv_col, step.temporal_col)
        )
        counter = f"{accepted}->{step.num_accepted_tokens}"
        print(f"{row:>7}  {accepted:>8}  {boundary:>8}  {offset:>6}  {conv:>8}  {temporal:>8}  {counter}")
    if shown < len(steps):
        print(f"    ... and {len(steps) - shown} more")
    print("('conv' and 'temporal' are source block -> destination block; with '-' no state is copied)\n")


def _bytes_moved(shapes: LayerStateShapes, steps: Sequence[RowStep], *, state_len: int) -> int:
    """Bytes that the step writes into the destination blocks of one layer."""
    conv_bytes, temporal_bytes = (
        sum(block.num_bytes for block in jax.tree.leaves(blocks)) for blocks in (shapes.conv, shapes.temporal)
    )
    return sum(
        max(state_len - step.offset, 0) * (conv_bytes // state_len) + temporal_bytes for step in steps if step.copies
    )


def _print_verdict(want_states: Any, want_counter: np.ndarray, got_states: Any, got_counter: Any) -> bool:
    """Compares every byte, prints the outcome and returns it."""
    num_bytes, differing = 0, []
    pairs = zip(
        jax.tree_util.tree_flatten_with_path((want_states, want_counter))[0],
        jax.tree.leaves((got_states, got_counter)),
        strict=True,
    )
    for (path, want), got in pairs:
        want_bytes, got_bytes = (np.ascontiguousarray(np.asarray(a)).reshape(-1).view(np.uint8) for a in (want, got))
        num_bytes += want_bytes.size
        if not np.array_equal(want_bytes, got_bytes):
            differing.append(jax.tree_util.keystr(path[1:]) or "num_accepted_tokens")
    if differing:
        print(f"verdict: WRONG, {len(differing)} arrays differ from the oracle, the first is {differing[0]}")
    else:
        print(f"verdict: OK, all {num_bytes} bytes are as the oracle says")
    return not differing


if __name__ == "__main__":
    sys.exit(main())
