"""How Mamba states are laid out over a mesh: tensor parallelism by heads and channels, data parallelism by rows."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from layouts.conv_state import ConvStateLayout
from layouts.state import MambaState, is_mamba_state

AxisName = str | tuple[str, ...] | None


def partition_specs(
    states: Any,
    *,
    conv_layout: ConvStateLayout | str,
    tensor_axis: AxisName = None,
    data_axis: AxisName = None,
) -> Any:
    """Returns the `PartitionSpec` of every leaf of `states`.

    Tensor parallelism slices the channels of conv states and the first block axis (heads) of temporal
    states. Data parallelism slices `num_blocks`: each data rank has pools of its own, named by
    rank-local block ids.

    Args:
      states: pytree of `MambaState`; only ranks are read.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      tensor_axis: mesh axis or axes of tensor parallelism; None for none. Static.
      data_axis: mesh axis or axes of data parallelism; None for none. Static.

    Returns:
      A pytree of the structure of `states`, for `in_specs` and `out_specs` of `jax.shard_map`.

    Raises:
      ValueError: `conv_layout` names nothing.
    """
    conv_layout = ConvStateLayout.parse(conv_layout)

    def of_state(state: MambaState) -> MambaState:
        lead = (None,) if state.stacked else ()

        def conv_spec(_: Any) -> PartitionSpec:
            axes = [data_axis, None, None]
            axes[conv_layout.dim_axis] = tensor_axis
            return PartitionSpec(*lead, *axes)

        def temporal_spec(leaf: Any) -> PartitionSpec:
            heads = (tensor_axis,) if len(leaf.shape) > len(lead) + 1 else ()
            return PartitionSpec(*lead, data_axis, *heads)

        return MambaState(
            conv=jax.tree.map(conv_spec, state.conv),
            temporal=jax.tree.map(temporal_spec, state.temporal),
            group=state.group,
            stacked=state.stacked,
        )

    return jax.tree.map(of_state, states, is_leaf=is_mamba_state)


def index_specs(indices: Any, *, data_axis: AxisName = None) -> Any:
    """Returns the `PartitionSpec` of every index array: rows by data rank, replicated among tensor ranks.

    Slot and row vectors are sliced along their only axis, block tables `[batch, columns]` and
    `[groups, batch, columns]` along `batch`. Each data rank then sees its own slots, rows and
    rank-local block ids. A `query_start_loc` has one entry more than rows on every rank, so with data
    parallelism it is the ranks' arrays one after the other.

    Args:
      indices: pytree of int32 arrays; scalars are replicated.
      data_axis: mesh axis or axes of data parallelism; None replicates everything. Static.

    Returns:
      A pytree of the structure of `indices`.

    Raises:
      ValueError: an array has more than three axes.
    """

    def of_array(array: Any) -> PartitionSpec:
        shape = jax.numpy.shape(array)
        if len(shape) > 3:
            raise ValueError(f"index arrays have rank 0 to 3, got one of shape {shape}")
        return PartitionSpec(*[(), (data_axis,), (data_axis, None), (None, data_axis, None)][len(shape)])

    return jax.tree.map(of_array, indices)
