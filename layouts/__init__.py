"""State layouts of hybrid Mamba models: what the pools look like, and the contracts they keep."""

from layouts.contracts import assert_block_tables, assert_integer_scalar, assert_mamba_states, assert_request_arrays
from layouts.conv_state import ConvStateLayout
from layouts.models import MODELS, MambaModel, StateShape, model
from layouts.state import MambaState

__all__ = [
    "MODELS",
    "ConvStateLayout",
    "MambaModel",
    "MambaState",
    "StateShape",
    "assert_block_tables",
    "assert_integer_scalar",
    "assert_mamba_states",
    "assert_request_arrays",
    "model",
]
