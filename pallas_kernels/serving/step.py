"""The device's half of a step: one jitted function with donated pools, from a plan to tokens and right state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from layouts import ConvStateLayout, MambaState
from pallas_kernels.inputs import PostprocessInputs, PreprocessInputs
from pallas_kernels.serving.blocks import NULL_BLOCK
from pallas_kernels.serving.copies import Copies, FusedCopies
from pallas_kernels.serving.model import Cache, LanguageModel
from pallas_kernels.state_copy import aligned_state_indices


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What is fixed for the life of an engine. Static.

    Attributes:
      block_size: tokens per block.
      num_spec: draft tokens per step, at most.
      conv_layout: "DS" or "SD".
      copies: who copies the states.
    """

    block_size: int
    num_spec: int
    conv_layout: str = "DS"
    copies: Copies = dataclasses.field(default_factory=FusedCopies)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["mamba_state_idx", "num_accepted_tokens"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Slots:
    """What stays on the device from step to step, int32 `[batch]` each.

    Attributes:
      mamba_state_idx: column of each row's running block.
      num_accepted_tokens: where its state is: `num_accepted_tokens - 1` checkpoints further.
    """

    mamba_state_idx: jax.Array
    num_accepted_tokens: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "block_tables",
        "fresh",
        "num_computed",
        "prefill",
        "num_prefill",
        "window",
        "num_window",
        "num_draft",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What the host decides for a step.

    Rows without a request are all zeros, and `fresh`, so that their column is -1 and nothing of them moves.

    Dims: B = batch, C = columns, T = most tokens of a chunk before the window, W = 1 + num_spec.

    Attributes:
      block_tables: int32 `[B, C]`.
      fresh: bool `[B]`: rows whose request comes new, or comes back.
      num_computed: int32 `[B]`: tokens whose state is computed.
      prefill: int32 `[B, T]`: known tokens before the window. T is 0 in a step where no row has any.
      num_prefill: int32 `[B]`: how many of them.
      window: int32 `[B, W]`: the last known token, and drafts.
      num_window: int32 `[B]`: how many of them; 0 where there is no request.
      num_draft: int32 `[B]`: how many of those are drafts.
    """

    block_tables: Any
    fresh: Any
    num_computed: Any
    prefill: Any
    num_prefill: Any
    window: Any
    num_window: Any
    num_draft: Any

    @property
    def num_scheduled(self) -> Any:
        """Tokens that each row computes, int32 `[B]`."""
        return self.num_prefill + self.num_window

    def running_column(self, block_size: int) -> Any:
        """Column of each row's last scheduled token, int32 `[B]`; -1 where there is no request."""
        return (self.num_computed + self.num_scheduled - 1) // block_size

    def preprocess_inputs(self, slots: Slots, block_size: int) -> PreprocessInputs:
        """A fresh request starts from its cached block, or from column -1 where it has none."""
        starts = jnp.zeros(1, jnp.int32)
        return PreprocessInputs(
            mamba_state_idx=jnp.where(self.fresh, (self.num_computed - 1) // block_size, slots.mamba_state_idx),
            num_accepted_tokens=jnp.where(self.fresh, 1, slots.num_accepted_tokens),
            num_computed_tokens=self.num_computed,
            query_start_loc=jnp.concatenate([starts, jnp.cumsum(self.num_scheduled, dtype=jnp.int32)]),
        )

    def postprocess_inputs(self, num_accepted: Any, block_size: int) -> PostprocessInputs:
        """What verification accepted, and how far each row had come. The host, too, decides from these."""
        return PostprocessInputs(
            mamba_state_idx=self.running_column(block_size),
            num_accepted_tokens=num_accepted,
            num_computed_tokens=self.num_computed,
            num_scheduled_tokens=self.num_scheduled,
            num_draft_tokens=self.num_draft,
        )


@functools.partial(jax.jit, static_argnames=("model", "config"), donate_argnames="states")
def serve_step(
    weights: Any, states: list[MambaState], slots: Slots, plan: StepPlan, *, model: LanguageModel, config: StepConfig
) -> tuple[list[MambaState], Slots, jax.Array, jax.Array]:
    """Runs one step: preprocess, forward over the window, accept, postprocess.

    Args:
      weights: of the model.
      states: the pools, one `MambaState` per layer. Donated.
      slots: where each row's state is.
      plan: what to compute.
      model: the model. Static.
      config: the engine's constants. Static.

    Returns:
      The states and slots after the step, the greedy token after each token of the window, int32 `[B, W]`, and how many
      of those count, the bonus token included, int32 `[B]`.
    """
    # 1. Every row's state moves to the column where its last scheduled token runs.
    states, slots = preprocess(states, slots, plan, config)

    # 2. The model runs over the known tokens, then over the window. Every checkpoint goes to a column of its own.
    cache = _read(states, slots, plan, model.conv_kernel, config)
    if plan.prefill.shape[1]:
        cache = model.prefill(weights, cache, plan.prefill, plan.num_prefill)
    logits, checkpoints = model.verify(weights, cache, plan.window)
    states = _write(states, plan, checkpoints, config)

    # 3. Drafts are good as long as they are what the model says. One more token comes for free.
    sampled = jnp.argmax(logits, axis=-1).T.astype(jnp.int32)
    is_draft = jnp.arange(config.num_spec) < plan.num_draft[:, None]
    good = is_draft & (sampled[:, :-1] == plan.window[:, 1:])
    num_accepted = 1 + jnp.cumprod(good, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)

    # 4. The state at the boundary that was reached, if one was, goes to the block that the host may publish.
    states, slots = postprocess(states, slots, plan, num_accepted, config)
    return states, slots, sampled, num_accepted


def preprocess(states: Any, slots: Slots, plan: StepPlan, config: StepConfig) -> tuple[Any, Slots]:
    """Moves every row's state into its running column."""
    inputs = plan.preprocess_inputs(slots, config.block_size)
    states, idx, counter = config.copies.preprocess(
        states, inputs, plan.block_tables, block_size=config.block_size, conv_layout=config.conv_layout
    )
    return states, Slots(idx, counter)


def postprocess(
    states: Any, slots: Slots, plan: StepPlan, num_accepted: jax.Array, config: StepConfig
) -> tuple[Any, Slots]:
    """Saves the states of the boundaries that were reached."""
    inputs = plan.postprocess_inputs(num_accepted, config.block_size)
    states, counter = config.copies.postprocess(
        states, inputs, plan.block_tables, block_size=config.block_size, conv_layout=config.conv_layout
    )
    return states, Slots(slots.mamba_state_idx, counter)


def _read(states: list[MambaState], slots: Slots, plan: StepPlan, conv_kernel: int, config: StepConfig) -> Cache:
    """Takes every row's true state from the pools: `num_accepted_tokens - 1` checkpoints after the running column's."""
    idx, offset = slots.mamba_state_idx, slots.num_accepted_tokens - 1
    has_state = plan.num_computed > 0

    def blocks(column: jax.Array) -> jax.Array:
        return jnp.take_along_axis(plan.block_tables, jnp.maximum(column, 0)[:, None], axis=1)[:, 0]

    def conv(pool: jax.Array) -> jax.Array:
        token = offset[:, None, None] + jnp.arange(conv_kernel - 1)
        inputs = jnp.take_along_axis(_dim_first(pool[blocks(idx)], config), token, axis=2)
        return jnp.where(has_state[:, None, None], inputs, 0)

    def temporal(pool: jax.Array) -> jax.Array:
        state = pool[blocks(idx + offset)]
        return jnp.where(has_state.reshape(-1, *[1] * (state.ndim - 1)), state, 0)

    return Cache(tuple(conv(state.conv) for state in states), tuple(temporal(state.temporal) for state in states))


def _write(states: list[MambaState], plan: StepPlan, checkpoints: Cache, config: StepConfig) -> list[MambaState]:
    """Puts temporal checkpoint i into column `mamba_state_idx + i`, and all conv inputs into the running column.

    Columns without a block have the null block's id: what has no place goes there. Where a row has fewer drafts than
    `num_spec`, the last checkpoints are rubbish, which the counter never points at.
    """
    blocks = aligned_state_indices(
        plan.block_tables,
        plan.num_computed + plan.num_scheduled,
        block_size=config.block_size,
        num_state_slots=1 + config.num_spec,
        null_block_id=NULL_BLOCK,
    )

    def conv(pool: jax.Array, after: jax.Array) -> jax.Array:
        # The inputs after the first token, and the one that each further token adds.
        inputs = jnp.concatenate([after[0], *(state[:, :, -1:] for state in after[1:])], axis=2)
        return pool.at[blocks[:, 0]].set(_dim_first(inputs, config))

    return [
        MambaState(conv=conv(state.conv, after_conv), temporal=state.temporal.at[blocks.T].set(after_temporal))
        for state, after_conv, after_temporal in zip(states, checkpoints.conv, checkpoints.temporal, strict=True)
    ]


def _dim_first(inputs: jax.Array, config: StepConfig) -> jax.Array:
    """Turns conv inputs `[B, D, L]` into the pool's layout, or back."""
    return inputs if ConvStateLayout.parse(config.conv_layout) == ConvStateLayout.DS else inputs.swapaxes(1, 2)
