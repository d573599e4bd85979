"""Who is timed: our implementations, the idiom users write today, and the memory limit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layouts import ConvStateLayout, MambaState
from pallas_kernels.bench.workload import Workload
from pallas_kernels.config import KernelConfig
from pallas_kernels.state_copy import copy_mamba_blocks, postprocess_mamba, preprocess_mamba
from pallas_kernels.state_copy_ref import copy_mamba_blocks_ref, postprocess_mamba_ref, preprocess_mamba_ref

OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "post": (postprocess_mamba, postprocess_mamba_ref),
    "pre": (preprocess_mamba, preprocess_mamba_ref),
    "copy": (copy_mamba_blocks, copy_mamba_blocks_ref),
}
NAMES = ("mosaic_gpu", "xla", "idiom", "limit")


def make_step(name: str, workload: Workload, config: KernelConfig | None) -> Callable[..., Any]:
    """Returns a jitted function of `(states, *arguments)` that updates refs and returns something small."""
    if name == "idiom":
        return jax.jit(functools.partial(_idiom, workload))
    operation, _ = OPERATIONS[workload.operation]

    def step(states: Any, *arguments: Any) -> Any:
        out = operation(states, *arguments, implementation=name, config=config, **workload.static_options)
        # The refs are up to date; a jitted function cannot return them.
        return [jnp.int32(0)] if workload.operation == "copy" else list(out[1:])

    return jax.jit(step)


def make_limit(workload: Workload) -> tuple[Callable[..., Any], Any]:
    """Returns an elementwise pass over as many bytes as the step moves, read and written in place, and its operand."""

    def scale(ref: Any) -> jax.Array:
        ref[...] = ref[...] * 1.0000001
        return jnp.int32(0)

    return jax.jit(scale), jax.new_ref(jnp.ones((max(workload.bytes_moved // 8, 1),), jnp.float32))


def _idiom(workload: Workload, states: list[MambaState], *arguments: Any) -> Any:
    """Whole-batch gather, shift, select and scatter for each pool, as one writes it without a kernel."""
    if workload.operation == "copy":
        src, dst, offset, temporal = arguments
        copies = src != dst
    else:
        inputs, table = arguments
        rows = jnp.arange(table.shape[0])
        post = workload.operation == "post"
        copies = inputs.num_accepted_tokens > 0
        idx, dst_col = (1, 0) if post else (0, workload.offset + 1)
        copies = inputs.mamba_state_idx == 1 if post else inputs.num_computed_tokens > 3
        offset = jnp.where(copies, inputs.num_accepted_tokens - 1, 0)
        src, dst, temporal = table[rows, idx], table[rows, dst_col], table[rows, idx + offset]
    token_axis = ConvStateLayout(workload.layout).token_axis

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
