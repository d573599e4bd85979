"""Shapes of one block of Mamba state on one tensor-parallel rank, per family of layers.

The functions take the sizes that a model's configuration gives and divide them by `tp`. A pool is a block with
`num_blocks` in front. The shapes are those that vLLM allocates (vllm-project/vllm, model_executor/layers/mamba/
mamba_utils.py), which has no `num_spec` for Mamba-1 and short conv; the default types are bfloat16 and float32.

Dims: D = conv channels of a rank, L = state_len = conv_kernel - 1 + num_spec tokens.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from layouts.conv_state import ConvStateLayout


@dataclasses.dataclass(frozen=True)
class StateShape:
    """Shape and type of one block of a state on one tensor-parallel rank.

    Attributes:
      shape: shape of a block, without `num_blocks`.
      dtype: type of its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class LayerStateShapes:
    """The states of one layer on one tensor-parallel rank, with the fields of `MambaState`.

    Attributes:
      conv: the conv state, `[D, L]` (DS) or `[L, D]` (SD); a tuple where its parts are kept apart,
        None where the layer has no conv.
      temporal: the temporal state, heads first; None where the layer has none.
    """

    conv: StateShape | tuple[StateShape, ...] | None = None
    temporal: StateShape | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of one block of every state of the layer."""
        return sum(block.num_bytes for block in jax.tree.leaves((self.conv, self.temporal)))


def mamba1_state_shapes(
    *,
    intermediate_size: int,
    state_size: int,
    conv_kernel: int,
    tp: int,
    conv_layout: ConvStateLayout | str,
    num_spec: int = 0,
    conv_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    temporal_dtype: jax.typing.DTypeLike = jnp.float32,
) -> LayerStateShapes:
    """Returns the states of a Mamba-1 layer: `intermediate_size` channels, each with its own SSM.

    Dims: conv `[D, L]` or `[L, D]`, temporal `[D, state_size]`, D = intermediate_size / tp.

    Args:
      intermediate_size: channels of the layer, all ranks together.
      state_size: SSM states per channel.
      conv_kernel: taps of the causal conv.
      tp: tensor-parallel ranks.
      conv_layout: "DS", "SD" or a `ConvStateLayout`.
      num_spec: draft tokens per step.
      conv_dtype: type of the conv state.
      temporal_dtype: type of the temporal state.

    Raises:
      ValueError: a size is below 1, `num_spec` is negative, or `tp` does not divide `intermediate_size`.
    """
    _check_positive(intermediate_size=intermediate_size, state_size=state_size, tp=tp)
    dim = _divide("intermediate_size", intermediate_size, tp)
    return LayerStateShapes(
        conv=_conv_shape(dim, conv_kernel, num_spec, conv_layout, conv_dtype),
        temporal=StateShape((dim, state_size), np.dtype(temporal_dtype)),
    )


def mamba2_state_shapes(
    *,
    intermediate_size: int,
    n_groups: int,
    num_heads: int,
    head_dim: int,
    state_size: int,
    conv_kernel: int,
    tp: int,
    conv_layout: ConvStateLayout | str,
    num_spec: int = 0,
    conv_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    temporal_dtype: jax.typing.DTypeLike = jnp.float32,
) -> LayerStateShapes:
    """Returns the states of a Mamba-2 layer, whose conv covers x and the B and C of every group.

    A rank needs the groups of its heads whole. With fewer groups than ranks each group is replicated on the ranks that
    share it, so that there are `tp` groups altogether, `tp - n_groups` of them extra: at `tp` ranks the conv states of
    all ranks together are then wider than at one. (vLLM has the same extra groups, and serves them for one group only.)

    Dims: conv `[D, L]` or `[L, D]`, temporal `[num_heads / tp, head_dim, state_size]`,
    D = (intermediate_size + 2 * max(n_groups, tp) * state_size) / tp.

    Args:
      intermediate_size: channels of x, all ranks together; `num_heads * head_dim` in the published models.
      n_groups: groups of heads that share B and C.
      num_heads: SSM heads, all ranks together.
      head_dim: channels of a head.
      state_size: SSM states per channel.
      conv_kernel: taps of the causal conv.
      tp: tensor-parallel ranks.
      conv_layout: "DS", "SD" or a `ConvStateLayout`.
      num_spec: draft tokens per step.
      conv_dtype: type of the conv state.
      temporal_dtype: type of the temporal state.

    Raises:
      ValueError: a size is below 1, `num_spec` is negative, `tp` does not divide `intermediate_size` or `num_heads`,
        or of `n_groups` and `tp` neither divides the other: some ranks would need more groups than others.
    """
    _check_positive(
        intermediate_size=intermediate_size,
        n_groups=n_groups,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=state_size,
        tp=tp,
    )
    if n_groups % tp and tp % n_groups:
        raise ValueError(f"tp={tp} neither divides n_groups={n_groups} nor is a multiple of it")
    local_groups = max(n_groups, tp) // tp
    dim = _divide("intermediate_size", intermediate_size, tp) + 2 * local_groups * state_size
    heads = _divide("num_heads", num_heads, tp)
    return LayerStateShapes(
        conv=_conv_shape(dim, conv_kernel, num_spec, conv_layout, conv_dtype),
        temporal=StateShape((heads, head_dim, state_size), np.dtype(temporal_dtype)),
    )


def gated_delta_net_state_shapes(
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_kernel: int,
    tp: int,
    conv_layout: ConvStateLayout | str,
    num_spec: int = 0,
    conv_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    temporal_dtype: jax.typing.DTypeLike = jnp.float32,
) -> LayerStateShapes:
    """Returns the states of a gated delta net layer, whose conv covers q, k and v.

    Dims: conv `[D, L]` or `[L, D]`, temporal `[num_v_heads / tp, head_v_dim, head_k_dim]`,
    D = (2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim) / tp.

    Args:
      num_k_heads: heads of q and of k, all ranks together.
      num_v_heads: heads of v, all ranks together.
      head_k_dim: channels of a head of q or k.
      head_v_dim: channels of a head of v.
      conv_kernel: taps of the causal conv.
      tp: tensor-parallel ranks.
      conv_layout: "DS", "SD" or a `ConvStateLayout`.
      num_spec: draft tokens per step.
      conv_dtype: type of the conv state.
      temporal_dtype: type of the temporal state.

    Raises:
      ValueError: a size is below 1, `num_spec` is negative, or `tp` does not divide `num_k_heads` or `num_v_heads`.
    """
    _check_positive(
        num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim, tp=tp
    )
    k_heads, v_heads = _divide("num_k_heads", num_k_heads, tp), _divide("num_v_heads", num_v_heads, tp)
    dim = 2 * k_heads * head_k_dim + v_heads * head_v_dim
    return LayerStateShapes(
        conv=_conv_shape(dim, conv_kernel, num_spec, conv_layout, conv_dtype),
        temporal=StateShape((v_heads, head_v_dim, head_k_dim), np.dtype(temporal_dtype)),
    )


def kda_state_shapes(
    *,
    num_heads: int,
    head_dim: int,
    conv_kernel: int,
    tp: int,
    conv_layout: ConvStateLayout | str,
    num_spec: int = 0,
    fused_conv: bool = True,
    conv_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    temporal_dtype: jax.typing.DTypeLike = jnp.float32,
) -> LayerStateShapes:
    """Returns the states of a Kimi delta attention layer, which has a conv each for q, k and v.

    Dims: conv `[D, L]` or `[L, D]`, D = 3 * num_heads * head_dim / tp, or three of a third of that;
    temporal `[num_heads / tp, head_dim, head_dim]`.

    Args:
      num_heads: heads, all ranks together.
      head_dim: channels of a head of q, k or v.
      conv_kernel: taps of the causal convs.
      tp: tensor-parallel ranks.
      conv_layout: "DS", "SD" or a `ConvStateLayout`.
      num_spec: draft tokens per step.
      fused_conv: whether q, k and v share one conv state; otherwise `conv` is a tuple of three, in that order.
      conv_dtype: type of the conv state.
      temporal_dtype: type of the temporal state.

    Raises:
      ValueError: a size is below 1, `num_spec` is negative, or `tp` does not divide `num_heads`.
    """
    _check_positive(num_heads=num_heads, head_dim=head_dim, tp=tp)
    heads = _divide("num_heads", num_heads, tp)
    dims = [3 * heads * head_dim] if fused_conv else [heads * head_dim] * 3
    convs = tuple(_conv_shape(dim, conv_kernel, num_spec, conv_layout, conv_dtype) for dim in dims)
    return LayerStateShapes(
        conv=convs[0] if fused_conv else convs,
        temporal=StateShape((heads, head_dim, head_dim), np.dtype(temporal_dtype)),
    )


def short_conv_state_shapes(
    *,
    dim: int,
    conv_kernel: int,
    tp: int,
    conv_layout: ConvStateLayout | str,
    num_spec: int = 0,
    conv_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> LayerStateShapes:
    """Returns the state of a short conv layer (LFM2), which has a conv and nothing else.

    Dims: conv `[D, L]` or `[L, D]`, D = dim / tp.

    Args:
      dim: channels of the conv, all ranks together.
      conv_kernel: taps of the causal conv.
      tp: tensor-parallel ranks.
      conv_layout: "DS", "SD" or a `ConvStateLayout`.
      num_spec: draft tokens per step.
      conv_dtype: type of the conv state.

    Raises:
      ValueError: a size is below 1, `num_spec` is negative, or `tp` does not divide `dim`.
    """
    _check_positive(dim=dim, tp=tp)
    return LayerStateShapes(conv=_conv_shape(_divide("dim", dim, tp), conv_kernel, num_spec, conv_layout, conv_dtype))


def linear_attention_state_shapes(
    *, num_heads: int, head_dim: int, tp: int, temporal_dtype: jax.typing.DTypeLike = jnp.float32
) -> LayerStateShapes:
    """Returns the state of a linear attention layer (MiniMax-Text-01), which has no conv.

    Dims: temporal `[num_heads / tp, head_dim, head_dim]`.

    Args:
      num_heads: heads, all ranks together.
      head_dim: channels of a head.
      tp: tensor-parallel ranks.
      temporal_dtype: type of the temporal state.

    Raises:
      ValueError: a size is below 1, or `tp` does not divide `num_heads`.
    """
    _check_positive(num_heads=num_heads, head_dim=head_dim, tp=tp)
    heads = _divide("num_heads", num_heads, tp)
    return LayerStateShapes(temporal=StateShape((heads, head_dim, head_dim), np.dtype(temporal_dtype)))


def _conv_shape(
    dim: int, conv_kernel: int, num_spec: int, conv_layout: ConvStateLayout | str, dtype: jax.typing.DTypeLike
) -> StateShape:
    """The conv block of a rank that has `dim` channels."""
    _check_positive(conv_kernel=conv_kernel)
    if num_spec < 0:
        raise ValueError(f"num_spec must not be negative, got {num_spec}")
    pool_shape = ConvStateLayout.parse(conv_layout).shape(1, dim, conv_kernel - 1 + num_spec)
    return StateShape(pool_shape[1:], np.dtype(dtype))


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}")


def _divide(name: str, size: int, tp: int) -> int:
    if size % tp:
        raise ValueError(f"tp={tp} does not divide {name}={size}")
    return size // tp
