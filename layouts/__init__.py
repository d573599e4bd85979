"""State layouts of hybrid Mamba models: what the pools look like, and the contracts they keep."""

from layouts.contracts import (
    assert_block_ids,
    assert_block_tables,
    assert_int32_vector,
    assert_integer_scalar,
    assert_mamba_states,
    assert_request_arrays,
)
from layouts.conv_state import ConvStateLayout
from layouts.models import MODELS, MambaModel, model
from layouts.shapes import (
    LayerStateShapes,
    StateShape,
    gated_delta_net_state_shapes,
    kda_state_shapes,
    linear_attention_state_shapes,
    mamba1_state_shapes,
    mamba2_state_shapes,
    short_conv_state_shapes,
)
from layouts.sharding import index_specs, partition_specs
from layouts.state import MambaState, is_mamba_state
from layouts.steps import RowStep, check_step, row_steps

__all__ = [
    "MODELS",
    "ConvStateLayout",
    "LayerStateShapes",
    "MambaModel",
    "MambaState",
    "RowStep",
    "StateShape",
    "assert_block_ids",
    "assert_block_tables",
    "assert_int32_vector",
    "assert_integer_scalar",
    "assert_mamba_states",
    "assert_request_arrays",
    "check_step",
    "gated_delta_net_state_shapes",
    "index_specs",
    "is_mamba_state",
    "kda_state_shapes",
    "linear_attention_state_shapes",
    "mamba1_state_shapes",
    "mamba2_state_shapes",
    "model",
    "partition_specs",
    "row_steps",
    "short_conv_state_shapes",
]
