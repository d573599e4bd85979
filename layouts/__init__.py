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
from layouts.models import MODELS, MambaModel, StateShape, model
from layouts.sharding import index_specs, partition_specs
from layouts.state import MambaState
from layouts.steps import RowStep, check_step, row_steps

__all__ = [
    "MODELS",
    "ConvStateLayout",
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
    "index_specs",
    "model",
    "partition_specs",
    "row_steps",
]
