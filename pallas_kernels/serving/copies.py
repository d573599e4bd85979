"""The state copies of a step: this library's fused launches, or the separate XLA copies that they replace."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from layouts import ConvStateLayout, MambaState
from pallas_kernels.inputs import PostprocessInputs, PreprocessInputs
from pallas_kernels.sharded import shard_operation
from pallas_kernels.state_copy import postprocess_mamba, preprocess_mamba

TENSOR_AXIS = "tensor"


class Copies(Protocol):
    """The two copies of a step, with the arguments and results of `preprocess_mamba` and `postprocess_mamba`.

    Hashable: it is static in the jitted step.
    """

    def preprocess(
        self, states: Any, inputs: PreprocessInputs, block_tables: jax.Array, *, block_size: int, conv_layout: str
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Moves every request's state into its new running column."""

    def postprocess(
        self, states: Any, inputs: PostprocessInputs, block_tables: jax.Array, *, block_size: int, conv_layout: str
    ) -> tuple[Any, jax.Array]:
        """Saves the state at the boundaries that were crossed."""


@dataclasses.dataclass(frozen=True)
class FusedCopies:
    """`preprocess_mamba` and `postprocess_mamba`: one launch each for all layers.

    Attributes:
      implementation: as in `postprocess_mamba`.
      interpret: as in `postprocess_mamba`.
      mesh: a mesh with the axis `TENSOR_AXIS`, over which pools are sliced; None on one device.
    """

    implementation: str | None = None
    interpret: bool = False
    mesh: jax.sharding.Mesh | None = None

    def preprocess(self, states: Any, inputs: PreprocessInputs, block_tables: jax.Array, **options: Any) -> Any:
        """Moves every request's state into its new running column."""
        return self._run(preprocess_mamba, states, inputs, block_tables, **options)

    def postprocess(self, states: Any, inputs: PostprocessInputs, block_tables: jax.Array, **options: Any) -> Any:
        """Saves the state at the boundaries that were crossed."""
        return self._run(postprocess_mamba, states, inputs, block_tables, **options)

    def _run(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        options |= {"implementation": self.implementation, "interpret": self.interpret}
        if self.mesh is not None:
            return shard_operation(operation, self.mesh, tensor_axis=TENSOR_AXIS, **options)(*arguments)
        return operation(*arguments, **options)


@dataclasses.dataclass(frozen=True)
class SeparateCopies:
    """What one writes without this library: for each pool a gather, a select and a scatter of the whole batch."""

    def preprocess(
        self, states: Any, inputs: PreprocessInputs, block_tables: jax.Array, *, block_size: int, conv_layout: str
    ) -> Any:
        """Moves every request's state into its new running column."""
        src_col, accepted = inputs.mamba_state_idx, inputs.num_accepted_tokens
        dst_col = (inputs.num_computed_tokens + jnp.diff(inputs.query_start_loc) - 1) // block_size
        moves = (src_col >= 0) & (src_col != dst_col)
        states = _copy_each(states, block_tables, moves, src_col, accepted - 1, dst_col, conv_layout)
        return states, dst_col, jnp.where(moves, 1, accepted)

    def postprocess(
        self, states: Any, inputs: PostprocessInputs, block_tables: jax.Array, *, block_size: int, conv_layout: str
    ) -> Any:
        """Saves the state at the boundaries that were crossed."""
        src_col, accepted = inputs.mamba_state_idx, inputs.num_accepted_tokens
        certain = inputs.num_computed_tokens + inputs.num_scheduled_tokens - inputs.num_draft_tokens
        boundary = (certain + accepted - 1) // block_size
        offset, dst_col = boundary * block_size - certain, boundary - 1
        crosses = (offset >= 0) & (boundary >= 1) & (src_col >= 0)
        states = _copy_each(states, block_tables, crosses, src_col, offset, dst_col, conv_layout)
        return states, jnp.where(crosses & (src_col == dst_col), 1, accepted)


def _copy_each(
    states: Any,
    block_tables: jax.Array,
    copies: jax.Array,
    src_col: jax.Array,
    offset: jax.Array,
    dst_col: jax.Array,
    conv_layout: str,
) -> Any:
    """Copies the rows where `copies`, one pool after the other."""
    offset = jnp.where(copies, offset, 0)

    def blocks(column: jax.Array) -> jax.Array:
        return jnp.take_along_axis(block_tables, jnp.maximum(column, 0)[:, None], axis=1)[:, 0]

    src, temporal_src, dst = blocks(src_col), blocks(src_col + offset), blocks(dst_col)
    token_axis = ConvStateLayout.parse(conv_layout).token_axis

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        # Rows that do not copy write to an id beyond the pool, which drops them.
        return pool.at[jnp.where(copies, dst, pool.shape[0])].set(new, mode="drop")

    def put_conv(pool: jax.Array) -> jax.Array:
        shape = [pool.shape[token_axis] if axis == token_axis else 1 for axis in range(pool.ndim)]
        token = jnp.arange(pool.shape[token_axis]).reshape(shape) + offset[:, None, None]
        shifted = jnp.take_along_axis(pool[src], jnp.minimum(token, pool.shape[token_axis] - 1), axis=token_axis)
        return put(pool, jnp.where(token < pool.shape[token_axis], shifted, pool[dst]))

    return [MambaState(put_conv(state.conv), put(state.temporal, state.temporal[temporal_src])) for state in states]
