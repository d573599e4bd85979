"""Static descriptions of the pools in a pytree of MambaStates."""

import dataclasses
import enum
import math
from typing import Any

import jax
import numpy as np

from layouts import is_mamba_state


class StateKind(enum.Enum):
    """What a pool holds."""

    CONV = "conv"
    TEMPORAL = "temporal"


@dataclasses.dataclass(frozen=True)
class Pool:
    """One leaf of `states`: everything about it but its bytes.

    Attributes:
      path: how the caller reaches the leaf, for messages. Not part of the identity.
      kind: conv or temporal.
      table: which block table names its blocks.
      num_layers: layers stacked in the leaf; None when the leaf has no layer axis.
      num_blocks: blocks per layer.
      block_shape: shape of one block.
      dtype: element type.
    """

    path: str = dataclasses.field(compare=False)
    kind: StateKind
    table: int
    num_layers: int | None
    num_blocks: int
    block_shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def block_size(self) -> int:
        """Elements of one block."""
        return math.prod(self.block_shape)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Elements of the whole pool."""
        return (1 if self.num_layers is None else self.num_layers) * self.num_blocks * self.block_size


def used_groups(states: Any) -> tuple[int, ...]:
    """The groups that some state uses, in order."""
    return tuple(sorted({state.group for state in jax.tree.leaves(states, is_leaf=is_mamba_state)}))


def flatten_pools(states: Any) -> tuple[tuple[Pool, ...], list[Any], Any]:
    """Flattens `states` into pools and leaves of the same order, and the treedef to rebuild it.

    `states` must have passed `layouts.assert_mamba_states`.
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(states, is_leaf=is_mamba_state)
    pools = []
    for node_path, state in nodes:
        for leaf_path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
            lead = 2 if state.stacked else 1
            pools.append(
                Pool(
                    path="states" + jax.tree_util.keystr(node_path + leaf_path),
                    kind=StateKind(leaf_path[0].name),
                    table=state.group,
                    num_layers=leaf.shape[0] if state.stacked else None,
                    num_blocks=leaf.shape[lead - 1],
                    block_shape=tuple(leaf.shape[lead:]),
                    dtype=np.dtype(leaf.dtype),
                )
            )
    leaves, treedef = jax.tree_util.tree_flatten(states)
    return tuple(pools), leaves, treedef
