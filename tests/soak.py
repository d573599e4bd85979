"""A long run of random engine steps, each checked against the oracle by a checksum of every byte.

`python tests/soak.py --steps 100000` prints its progress; the exit status is 1 at the first step that differs.
"""

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from layouts import MambaState
from pallas_kernels import (
    PostprocessInputs,
    PreprocessInputs,
    postprocess_mamba,
    postprocess_mamba_ref,
    preprocess_mamba,
    preprocess_mamba_ref,
)

BATCH, SLOTS = 3, 4
BLOCK_SIZE, COLUMNS, MAX_DRAFT = 4, 9, 3
NUM_BLOCKS = 1 + BATCH * COLUMNS
CHUNK = 500
# A request that holds more tokens makes room for a new one: its checkpoints might not all have a column.
FULL = (COLUMNS - MAX_DRAFT) * BLOCK_SIZE - 1 - MAX_DRAFT


class Engine(NamedTuple):
    """What lives from step to step. The request vectors are int32 `[SLOTS]`."""

    states: list[MambaState]
    idx: Any
    counter: Any
    computed: Any


class Step(NamedTuple):
    """The random part of a step.

    Attributes:
      tables: int32 `[BATCH, COLUMNS]`, distinct blocks.
      mapping: int32 `[BATCH]`, distinct slots, or -1.
      num_reqs: int32 scalar.
      drafts: int32 `[SLOTS]`.
      accepted: int32 `[SLOTS]`, 1..1 + drafts.
      restart: bool `[SLOTS]`, slots that a new request takes.
      fill: int32 `[BATCH, 1 + MAX_DRAFT]`, what the forward pass writes, one number per checkpoint.
    """

    tables: Any
    mapping: Any
    num_reqs: Any
    drafts: Any
    accepted: Any
    restart: Any
    fill: Any


def new_engine() -> Engine:
    """Four slots without a request; pools that the kernel takes, of two types and blocks of two sizes."""
    states = [
        MambaState(
            conv=np.zeros((NUM_BLOCKS, 8, 1 + MAX_DRAFT), jnp.bfloat16), temporal=np.zeros((NUM_BLOCKS, 4), np.float32)
        )
        for _ in range(2)
    ]
    zeros = np.zeros(SLOTS, np.int32)
    return Engine(states, zeros - 1, zeros + 1, zeros)


def random_steps(rng: np.random.Generator, count: int) -> Step:
    """`count` steps, stacked. The block tables change from step to step: a checksum covers every block anyway."""
    drafts = rng.integers(0, MAX_DRAFT + 1, (count, SLOTS))
    mapping = rng.permuted(np.tile(np.arange(SLOTS), (count, 1)), axis=1)[:, :BATCH]
    steps = Step(
        tables=rng.permuted(np.tile(np.arange(NUM_BLOCKS), (count, 1)), axis=1)[:, 1:].reshape(count, BATCH, COLUMNS),
        mapping=np.where(rng.random((count, BATCH)) < 0.1, -1, mapping),
        num_reqs=rng.choice([BATCH - 1, BATCH, BATCH + 1], count),
        drafts=drafts,
        accepted=rng.integers(1, drafts + 2),
        restart=rng.random((count, SLOTS)) < 0.02,
        fill=rng.integers(0, 224, (count, BATCH, 1 + MAX_DRAFT)),
    )
    return Step(*(array if array.dtype == bool else array.astype(np.int32) for array in steps))


def run_step(xp: Any, pre: Callable, post: Callable, put: Callable, engine: Engine, step: Step) -> Engine:
    """Preprocess, a forward pass that overwrites the blocks it owns, and postprocess, with NumPy or JAX."""
    restart = step.restart | (engine.computed > FULL)
    idx, counter = xp.where(restart, -1, engine.idx), xp.where(restart, 1, engine.counter)
    computed = xp.where(restart, 0, engine.computed)
    scheduled = step.drafts + 1
    slot = xp.maximum(step.mapping, 0)
    ends = xp.cumsum(scheduled[slot]).astype(xp.int32)
    options = {"block_size": BLOCK_SIZE, "conv_layout": "DS", "num_reqs": step.num_reqs, "idx_mapping": step.mapping}
    states, idx, counter = pre(
        engine.states,
        PreprocessInputs(
            mamba_state_idx=idx,
            num_accepted_tokens=counter,
            num_computed_tokens=computed,
            query_start_loc=xp.concatenate([ends[:1] * 0, ends]),
        ),
        step.tables,
        **options,
    )
    row = xp.arange(BATCH)
    live = (step.mapping >= 0) & (row < step.num_reqs)
    offset = xp.arange(1 + MAX_DRAFT)
    blocks = step.tables[row[:, None], xp.clip(idx[slot][:, None] + offset, 0, COLUMNS - 1)]
    states = put(states, blocks, live[:, None] & (offset < scheduled[slot][:, None]), step.fill)
    in_batch = ((step.mapping[:, None] == xp.arange(SLOTS)) & live[:, None]).any(axis=0)
    accepted = xp.where(in_batch, step.accepted, counter)
    states, counter = post(
        states,
        PostprocessInputs(
            mamba_state_idx=idx,
            num_accepted_tokens=accepted,
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
            num_draft_tokens=step.drafts,
        ),
        step.tables,
        **options,
    )
    return Engine(states, idx, counter, computed + xp.where(in_batch, accepted, 0))


def _values(xp: Any, pool: Any, fill: Any) -> Any:
    """Blocks of small whole numbers, which every type holds exactly, one for each entry of `fill`."""
    element = xp.arange(math.prod(pool.shape[1:])).reshape(pool.shape[1:])
    return (fill.reshape(*fill.shape, *[1] * element.ndim) + element).astype(pool.dtype)


def _put_jax(states: list[MambaState], blocks: jax.Array, writes: jax.Array, fill: jax.Array) -> list[MambaState]:
    at = jnp.where(writes, blocks, NUM_BLOCKS)
    return jax.tree.map(lambda pool: pool.at[at].set(_values(jnp, pool, fill), mode="drop"), states)


def _put_numpy(states: list[MambaState], blocks: np.ndarray, writes: np.ndarray, fill: np.ndarray) -> list[MambaState]:
    for pool in jax.tree.leaves(states):
        pool[blocks[writes]] = _values(np, pool, fill)[writes]
    return states


def _weights(engine: Engine) -> list[np.ndarray]:
    """An odd number for each element: a byte that changes, or moves, changes the sum of the products."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 2**31, np.shape(leaf), np.uint32) * np.uint32(2) + 1 for leaf in jax.tree.leaves(engine)]


def _checksum(xp: Any, bits: Callable[[Any], Any], engine: Engine, weights: Sequence[Any]) -> Any:
    sums = [
        xp.sum(bits(leaf).astype(xp.uint32) * weight, dtype=xp.uint32)
        for leaf, weight in zip(jax.tree.leaves(engine), weights, strict=True)
    ]
    return functools.reduce(lambda a, b: a ^ b, sums)


def oracle_checksums(engine: Engine, steps: Step, weights: Sequence[Any]) -> tuple[Engine, np.ndarray]:
    """The checksum after each step, by NumPy."""
    sums = []
    for i in range(len(steps.num_reqs)):
        step = jax.tree.map(lambda array, i=i: array[i], steps)
        engine = run_step(np, preprocess_mamba_ref, postprocess_mamba_ref, _put_numpy, engine, step)
        sums.append(_checksum(np, lambda leaf: leaf.view(f"u{leaf.dtype.itemsize}"), engine, weights))
    return engine, np.array(sums, np.uint32)


def make_device_checksums(implementation: str) -> Callable[..., tuple[Engine, jax.Array]]:
    """A jitted function that runs many steps as one program, and returns the checksum after each."""
    pre = functools.partial(preprocess_mamba, implementation=implementation)
    post = functools.partial(postprocess_mamba, implementation=implementation)

    def bits(leaf: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"u{leaf.dtype.itemsize}"))

    @functools.partial(jax.jit, donate_argnums=0)
    def device_checksums(engine: Engine, steps: Step, weights: Sequence[Any]) -> tuple[Engine, jax.Array]:
        def body(engine: Engine, step: Step) -> tuple[Engine, jax.Array]:
            engine = run_step(jnp, pre, post, _put_jax, engine, step)
            return engine, _checksum(jnp, bits, engine, weights)

        return jax.lax.scan(body, engine, steps)

    return device_checksums


def chunks(rng: np.random.Generator, count: int) -> Iterator[Step]:
    """`count` steps, CHUNK at a time: the last chunk may be more than is needed, as one shape compiles once."""
    for _ in range(0, count, CHUNK):
        yield random_steps(rng, CHUNK)


def soak(count: int, seed: int, implementation: str) -> int | None:
    """Runs `count` steps; returns the number of the first one that differs, counted from 0, or None."""
    rng = np.random.default_rng(seed)
    on_host = new_engine()
    on_device = jax.tree.map(jnp.asarray, on_host)
    weights = _weights(on_host)
    device_checksums = make_device_checksums(implementation)
    start, done = time.perf_counter(), 0
    for steps in chunks(rng, count):
        # The device runs while NumPy works.
        on_device, got = device_checksums(on_device, jax.tree.map(jnp.asarray, steps), weights)
        on_host, want = oracle_checksums(on_host, steps, weights)
        differing = np.flatnonzero(np.asarray(got) != want)
        if differing.size:
            return done + int(differing[0])
        done += CHUNK
        if done % (CHUNK * max(1, count // (20 * CHUNK))) == 0 or done >= count:
            rate = done / (time.perf_counter() - start)
            print(f"step {done} of {count}: every checksum agrees, {rate:.0f} steps/s", flush=True)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak test and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", default=100_000, type=int, metavar="N", help="steps to run")
    parser.add_argument("--seed", default=0, type=int, help="of the random steps")
    parser.add_argument("--implementation", default="xla", choices=["xla", "mosaic_gpu"])
    args = parser.parse_args(argv)
    print(f"{args.implementation} on {jax.devices()[0].device_kind}, JAX {jax.__version__}, seed {args.seed}")
    if (step := soak(args.steps, args.seed, args.implementation)) is not None:
        print(f"WRONG: step {step} differs from the oracle; run again with --seed {args.seed} --steps {step + 1}")
        return 1
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
