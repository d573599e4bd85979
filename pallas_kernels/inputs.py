"""The per-request arrays of a step, one dataclass per operation.

Keyword-only, because swapping two int32 arrays would be silent.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.export


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "mamba_state_idx",
        "num_accepted_tokens",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "num_draft_tokens",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PostprocessInputs:
    """What `postprocess_mamba` knows of each request, int32 `[slots]`, in slot order.

    Attributes:
      mamba_state_idx: column of the request's running block; -1 where it has none.
      num_accepted_tokens: tokens that verification accepted, the bonus token included: at least 1,
        as in vLLM, and as sglang-jax's `accept_lens`. tpu-inference's read offset is this minus 1. A
        row with 0 is left alone.
      num_computed_tokens: tokens whose state was computed before the step; where the two counts
        below are None, the tokens that are final after it.
      num_scheduled_tokens: tokens scheduled in the step, drafts included.
      num_draft_tokens: draft tokens among them. Both counts are given, or neither.
    """

    mamba_state_idx: Any
    num_accepted_tokens: Any
    num_computed_tokens: Any
    num_scheduled_tokens: Any = None
    num_draft_tokens: Any = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["mamba_state_idx", "num_accepted_tokens", "num_computed_tokens", "query_start_loc"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessInputs:
    """What `preprocess_mamba` knows of each request.

    Attributes:
      mamba_state_idx: int32 `[slots]`: column of the request's running block; -1 where it has none.
      num_accepted_tokens: int32 `[slots]`: tokens accepted in the step before, the bonus token included.
      num_computed_tokens: int32 `[slots]`: tokens whose state is computed.
      query_start_loc: int32 `[batch + 1]`, in batch order: where each row's scheduled tokens start
        among those of the batch; the last entry is their total.
    """

    mamba_state_idx: Any
    num_accepted_tokens: Any
    num_computed_tokens: Any
    query_start_loc: Any


# An exported program names its arguments' types; these have no static fields.
for _inputs in (PostprocessInputs, PreprocessInputs):
    jax.export.register_pytree_node_serialization(
        _inputs,
        serialized_name=f"mamba_state_pallas.{_inputs.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
