"""MambaState: the state pools of one Mamba layer, or of a stack of layers."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.export


@functools.partial(jax.tree_util.register_dataclass, data_fields=["conv", "temporal"], meta_fields=["group", "stacked"])
@dataclasses.dataclass(frozen=True)
class MambaState:
    """The paged state pools of one layer, or of `num_layers` layers when `stacked`.

    Nothing is validated when one is built, since `jax.tree.map` puts anything in the leaves;
    the operations of `pallas_kernels` check what they are given.

    Dims: N = num_blocks, D = dim, L = state_len.

    Attributes:
      conv: the conv state, `[N, D, L]` (DS) or `[N, L, D]` (SD), any dtype. A tuple of such arrays
        where the parts of a layer are kept apart (q, k and v, say); None where there is no conv.
      temporal: the SSM state, `[N, ...]`, any rank and dtype: a block is opaque and copied whole. A
        tuple of arrays, or None where the layer has none or the engine keeps it elsewhere.
      group: which block table the layer uses. Static.
      stacked: whether every leaf has a leading layer axis, `[num_layers, N, ...]`. Static.
    """

    conv: Any = None
    temporal: Any = None
    group: int = 0
    stacked: bool = False


# An exported program names its arguments' types. The static fields travel as JSON.
jax.export.register_pytree_node_serialization(
    MambaState,
    serialized_name="mamba_state_pallas.MambaState",
    serialize_auxdata=lambda fields: json.dumps(fields).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(bytes(data))),
)


def is_mamba_state(node: Any) -> bool:
    """Whether a node of a pytree is a MambaState, for `is_leaf`."""
    return isinstance(node, MambaState)
