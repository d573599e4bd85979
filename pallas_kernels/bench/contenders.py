"""Who is timed: our implementations, the idiom users write today, and the bounds."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layouts import ConvStateLayout, MambaState
from pallas_kernels.bench.workload import BLOCK_SIZE, Workload
from pallas_kernels.config import KernelConfig
from pallas_kernels.state_copy import copy_mamba_blocks, postprocess_mamba, preprocess_mamba
from pallas_kernels.state_copy_ref import copy_mamba_blocks_ref, postprocess_mamba_ref, preprocess_mamba_ref

OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "post": (postprocess_mamba, postprocess_mamba_ref),
    "pre": (preprocess_mamba, preprocess_mamba_ref),
    "copy": (copy_mamba_blocks, copy_mamba_blocks_ref),
}
# In the order in which they run. The first has the pools as arrays, before they become refs.
CONTENDERS = {
    "vllm": "vLLM's Triton kernel, see --vllm",
    "limit": "an elementwise copy of as many bytes",
    "empty": "a jitted call that takes the same pools and does nothing",
    "mosaic_gpu": "ours, Pallas",
    "xla": "ours, XLA",
    "idiom": "gathers and scatters of the whole batch, as one writes them without a kernel",
}
# What these do is no copy, so there is nothing to verify.
BOUNDS = ("limit", "empty")


def make_step(name: str, workload: Workload, config: KernelConfig) -> Callable[..., Any]:
    """Returns a jitted function of `(states, *arguments)` that updates refs and returns something small.

    Workloads of the same shapes get the same function, which so is compiled once.
    """
    return _make_step(name, workload.operation, tuple(workload.static_options.items()), config)


@functools.cache
def _make_step(name: str, operation: str, options: tuple[tuple[str, Any], ...], config: KernelConfig) -> Any:
    if name == "idiom":
        return jax.jit(functools.partial(_idiom, operation, dict(options)["conv_layout"]))
    if name == "empty":
        return jax.jit(_empty, keep_unused=True)
    run, _ = OPERATIONS[operation]

    def step(states: Any, *arguments: Any) -> Any:
        out = run(states, *arguments, implementation=name, config=config, **dict(options))
        # The refs are up to date; a jitted function cannot return them.
        return [jnp.int32(0)] if operation == "copy" else list(out[1:])

    return jax.jit(step)


@functools.cache
def limit_step() -> Callable[..., Any]:
    """Returns a jitted elementwise copy from a ref to another.

    It works on as many bytes as it moves, like a copy of blocks: in place it would need half of them,
    which a cache might hold.
    """

    def scale(src: Any, dst: Any) -> jax.Array:
        dst[...] = src[...] * 1.0000001
        return jnp.int32(0)

    return jax.jit(scale)


def limit_operands(num_bytes: int) -> tuple[Any, Any]:
    """Returns what `limit_step` copies so that it moves `num_bytes`, read and written."""
    size = max(num_bytes // 8, 1)
    return jax.new_ref(jnp.ones(size, jnp.float32)), jax.new_ref(jnp.zeros(size, jnp.float32))


def _empty(states: list[MambaState], *arguments: Any) -> Any:
    """Does nothing with what it is given."""
    return [jnp.int32(0)]


def _idiom(operation: str, layout: str, states: list[MambaState], *arguments: Any) -> Any:
    """Whole-batch gather, shift, select and scatter for each pool, as one writes it without a kernel."""
    if operation == "copy":
        src, dst, offset, temporal = arguments
        copies = src != dst
    else:
        inputs, table = arguments
        rows = jnp.arange(table.shape[0])
        accepted = inputs.num_accepted_tokens
        if operation == "post":
            running = inputs.num_computed_tokens + inputs.num_scheduled_tokens - inputs.num_draft_tokens
            aligned = (running + accepted - 1) // BLOCK_SIZE * BLOCK_SIZE
            copies, offset, dst_col = aligned >= running, aligned - running, aligned // BLOCK_SIZE - 1
        else:
            scheduled = jnp.diff(inputs.query_start_loc)
            dst_col = (inputs.num_computed_tokens + scheduled - 1) // BLOCK_SIZE
            copies, offset = dst_col != inputs.mamba_state_idx, accepted - 1
        offset = jnp.where(copies, offset, 0)
        src = table[rows, inputs.mamba_state_idx]
        # A row that does not copy writes what it reads, to the null block.
        dst = jnp.where(copies, table[rows, dst_col], 0)
        temporal = table[rows, inputs.mamba_state_idx + offset]
    token_axis = ConvStateLayout(layout).token_axis

    def moved(ref: Any, source: jax.Array, shift: bool) -> None:
        pool = ref[...]
        lead = (-1,) + (1,) * (pool.ndim - 1)
        new, old = pool[source], pool[dst]
        keep = copies.reshape(lead)
        if shift:
            token = jnp.arange(pool.shape[token_axis]).reshape([-1 if a == token_axis else 1 for a in range(pool.ndim)])
            at = token + offset.reshape(lead)
            new = jnp.take_along_axis(new, jnp.minimum(at, pool.shape[token_axis] - 1), axis=token_axis)
            keep = keep & (at < pool.shape[token_axis])
        ref[...] = pool.at[dst].set(jnp.where(keep, new, old))

    for state in states:
        moved(state.conv, src, True)
        if state.temporal is not None:
            moved(state.temporal, temporal, False)
    return [jnp.int32(0)]
