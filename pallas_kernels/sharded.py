"""Runs an operation on a mesh: every device copies its own shard, and nothing is communicated."""

from collections.abc import Callable
from typing import Any

import jax

from layouts import ConvStateLayout, index_specs, partition_specs
from pallas_kernels.state_copy import copy_mamba_blocks, postprocess_mamba, preprocess_mamba

AxisName = str | tuple[str, ...] | None

# Vectors that each operation returns behind the states.
_NUM_VECTORS = {copy_mamba_blocks: 0, postprocess_mamba: 1, preprocess_mamba: 2}
_TRACED_OPTIONS = ("idx_mapping", "num_reqs", "num_copies")


def shard_operation(
    operation: Callable[..., Any],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    conv_layout: ConvStateLayout | str,
    tensor_axis: AxisName = None,
    data_axis: AxisName = None,
    **options: Any,
) -> Callable[..., Any]:
    """Returns `operation` as a function of sharded states and index arrays, under `jax.shard_map`.

    Tensor ranks hold slices of every block and run the same copies. Data ranks hold pools, slots and
    rows of their own; block ids, slots in `idx_mapping` and `query_start_loc` are rank-local.

    Args:
      operation: `postprocess_mamba`, `preprocess_mamba` or `copy_mamba_blocks`.
      mesh: the mesh; its axes may be Auto or Explicit.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      tensor_axis: mesh axis or axes that slice channels and heads. Static.
      data_axis: mesh axis or axes that slice `num_blocks`, slots and rows. Static.
      **options: static options of the operation.

    Returns:
      A function `(states, *arguments, idx_mapping=, num_reqs=, num_copies=)` that returns what the
      operation returns. Array leaves of `states` are donated to the copy; under an outer `jax.jit`,
      donate them there. With data parallelism a count may be int32 `[data ranks]`, one per rank.

    Raises:
      ValueError: `operation` is none of the three.
    """
    if operation not in _NUM_VECTORS:
        names = ", ".join(known.__name__ for known in _NUM_VECTORS)
        raise ValueError(f"operation must be one of {names}, got {operation!r}")

    def on_shards(states: Any, arguments: tuple[Any, ...], traced: dict[str, Any]) -> Any:
        traced = {name: value.reshape(()) if name != "idx_mapping" else value for name, value in traced.items()}
        return operation(states, *arguments, conv_layout=conv_layout, **traced, **options)

    def call(states: Any, *arguments: Any, **traced: Any) -> Any:
        if unknown := traced.keys() - set(_TRACED_OPTIONS):
            raise TypeError(f"{sorted(unknown)} must be given to shard_operation, not to its result")
        traced = {name: jax.numpy.asarray(value) for name, value in traced.items() if value is not None}
        state_specs = partition_specs(states, conv_layout=conv_layout, tensor_axis=tensor_axis, data_axis=data_axis)
        vector_spec = jax.sharding.PartitionSpec(data_axis)
        num_vectors = _NUM_VECTORS[operation]
        specs = index_specs((arguments, traced), data_axis=data_axis)
        # The kernel writes through refs, which the check of varying axes does not know.
        sharded = jax.shard_map(
            on_shards,
            mesh=mesh,
            in_specs=(state_specs, *specs),
            out_specs=(state_specs, *[vector_spec] * num_vectors) if num_vectors else state_specs,
            check_vma=False,
        )
        return sharded(states, arguments, traced)

    return call
