"""The arithmetic of every family of layers, with sizes from published configurations."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from layouts import (
    LayerStateShapes,
    StateShape,
    gated_delta_net_state_shapes,
    kda_state_shapes,
    linear_attention_state_shapes,
    mamba1_state_shapes,
    mamba2_state_shapes,
    short_conv_state_shapes,
)

BF16, F32 = np.dtype("bfloat16"), np.dtype("float32")

JAMBA = {"intermediate_size": 8192, "state_size": 16, "conv_kernel": 4}
NEMOTRON_SUPER = {
    "intermediate_size": 8192,
    "n_groups": 8,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "conv_kernel": 4,
}
GRANITE_MICRO = NEMOTRON_SUPER | {"intermediate_size": 4096, "n_groups": 1, "num_heads": 64}
QWEN_9B = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128, "conv_kernel": 4}
KIMI_LINEAR = {"num_heads": 32, "head_dim": 128, "conv_kernel": 4}
LFM2 = {"dim": 2048, "conv_kernel": 3}
MINIMAX = {"num_heads": 64, "head_dim": 128}
DS = {"tp": 1, "conv_layout": "DS"}

FAMILIES = [
    pytest.param(mamba1_state_shapes, JAMBA | DS, id="mamba1"),
    pytest.param(mamba2_state_shapes, NEMOTRON_SUPER | DS, id="mamba2"),
    pytest.param(gated_delta_net_state_shapes, QWEN_9B | DS, id="gated_delta_net"),
    pytest.param(kda_state_shapes, KIMI_LINEAR | DS, id="kda"),
    pytest.param(short_conv_state_shapes, LFM2 | DS, id="short_conv"),
    pytest.param(linear_attention_state_shapes, MINIMAX | {"tp": 1}, id="linear_attention"),
]
FAMILIES_WITH_CONV = FAMILIES[:-1]

type Family = Callable[..., LayerStateShapes]


def test_mamba1_has_one_ssm_per_channel() -> None:
    shapes = mamba1_state_shapes(**JAMBA, tp=2, conv_layout="DS", num_spec=1)
    assert shapes == LayerStateShapes(conv=StateShape((4096, 4), BF16), temporal=StateShape((4096, 16), F32))


def test_mamba2_conv_covers_x_and_the_groups() -> None:
    shapes = mamba2_state_shapes(**NEMOTRON_SUPER, **DS, num_spec=1)
    assert shapes == LayerStateShapes(conv=StateShape((10240, 4), BF16), temporal=StateShape((128, 64, 128), F32))
    assert mamba2_state_shapes(**GRANITE_MICRO, **DS).conv.shape == (4352, 3)


@pytest.mark.parametrize(
    ("n_groups", "tp", "dim"),
    [
        (8, 1, 10240),
        (8, 2, 5120),
        (8, 8, 1280),
        (16, 8, 1536),  # two groups a rank
        (1, 1, 8448),
        (1, 2, 4352),  # one group a rank from here on: 8192 / tp + 2 * 128
        (1, 8, 1280),
        (2, 4, 2304),
        (8, 16, 768),
    ],
)
def test_mamba2_rank_has_at_least_one_whole_group(n_groups: int, tp: int, dim: int) -> None:
    sizes = NEMOTRON_SUPER | {"n_groups": n_groups}
    assert mamba2_state_shapes(**sizes, tp=tp, conv_layout="DS").conv.shape == (dim, 3)


@pytest.mark.parametrize(("n_groups", "tp"), [(3, 2), (3, 4), (6, 4)])
def test_mamba2_groups_that_ranks_cannot_share_evenly_are_refused(n_groups: int, tp: int) -> None:
    message = rf"tp={tp} neither divides n_groups={n_groups} nor is a multiple of it"
    with pytest.raises(ValueError, match=message):
        mamba2_state_shapes(**NEMOTRON_SUPER | {"n_groups": n_groups}, tp=tp, conv_layout="DS")


def test_gated_delta_net_conv_covers_q_k_and_v() -> None:
    shapes = gated_delta_net_state_shapes(**QWEN_9B, **DS, num_spec=2)
    assert shapes == LayerStateShapes(conv=StateShape((8192, 5), BF16), temporal=StateShape((32, 128, 128), F32))


def test_gated_delta_net_keeps_value_channels_before_key_channels() -> None:
    sizes = {"num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 96, "head_v_dim": 192, "conv_kernel": 4}
    shapes = gated_delta_net_state_shapes(**sizes, tp=2, conv_layout="DS")
    assert (shapes.conv.shape, shapes.temporal.shape) == ((1152, 3), (4, 192, 96))


def test_kda_keeps_q_k_and_v_in_one_conv_or_in_three() -> None:
    temporal = StateShape((8, 128, 128), F32)
    fused = kda_state_shapes(**KIMI_LINEAR, tp=4, conv_layout="DS", num_spec=1)
    assert fused == LayerStateShapes(conv=StateShape((3072, 4), BF16), temporal=temporal)
    apart = kda_state_shapes(**KIMI_LINEAR, tp=4, conv_layout="DS", num_spec=1, fused_conv=False)
    assert apart == LayerStateShapes(conv=(StateShape((1024, 4), BF16),) * 3, temporal=temporal)
    assert fused.num_bytes == apart.num_bytes == 548864
    assert kda_state_shapes(**KIMI_LINEAR, **DS, num_spec=1).conv.shape == (12288, 4)


def test_short_conv_has_no_temporal_state() -> None:
    assert short_conv_state_shapes(**LFM2, **DS) == LayerStateShapes(conv=StateShape((2048, 2), BF16))
    assert short_conv_state_shapes(dim=8448, conv_kernel=4, tp=4, conv_layout="DS").conv.shape == (2112, 3)


def test_linear_attention_has_no_conv_state() -> None:
    assert linear_attention_state_shapes(**MINIMAX, tp=8) == LayerStateShapes(temporal=StateShape((8, 128, 128), F32))


def test_bytes_of_a_layer_count_every_state() -> None:
    assert gated_delta_net_state_shapes(**QWEN_9B, **DS, num_spec=2).num_bytes == 2179072
    assert short_conv_state_shapes(**LFM2, **DS).num_bytes == 8192
    assert linear_attention_state_shapes(**MINIMAX, tp=1).num_bytes == 4194304


def test_types_can_be_chosen() -> None:
    shapes = mamba2_state_shapes(**NEMOTRON_SUPER, **DS, conv_dtype="float16", temporal_dtype=jnp.bfloat16)
    assert (shapes.conv.dtype, shapes.temporal.dtype) == (np.dtype("float16"), BF16)


@pytest.mark.parametrize(("family", "sizes"), FAMILIES_WITH_CONV)
def test_layout_turns_the_conv_and_nothing_else(family: Family, sizes: dict[str, Any]) -> None:
    ds, sd = (family(**sizes | {"conv_layout": layout}) for layout in ("DS", "SD"))
    assert sd.conv.shape == ds.conv.shape[::-1]
    assert sd.temporal == ds.temporal


@pytest.mark.parametrize(("family", "sizes"), FAMILIES_WITH_CONV)
def test_every_draft_token_lengthens_the_window_by_one(family: Family, sizes: dict[str, Any]) -> None:
    lengths = [family(**sizes, num_spec=num_spec).conv.shape[1] for num_spec in (0, 1, 7)]
    assert [length - (sizes["conv_kernel"] - 1) for length in lengths] == [0, 1, 7]


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_sizes_below_one_are_refused_by_name(family: Family, sizes: dict[str, Any]) -> None:
    for name in sizes.keys() - {"conv_layout"}:
        for size in (0, -4):
            with pytest.raises(ValueError, match=rf"^{name} must be positive, got {size}$"):
                family(**sizes | {name: size})


@pytest.mark.parametrize(("family", "sizes"), FAMILIES_WITH_CONV)
def test_negative_num_spec_and_unknown_layouts_are_refused(family: Family, sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^num_spec must not be negative, got -1$"):
        family(**sizes, num_spec=-1)
    with pytest.raises(ValueError, match=r"^conv_layout must be 'DS' or 'SD', got 'NHD'$"):
        family(**sizes | {"conv_layout": "NHD"})


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        (mamba1_state_shapes, JAMBA | DS, "tp=3 does not divide intermediate_size=8192"),
        (mamba2_state_shapes, GRANITE_MICRO | DS, "tp=3 does not divide intermediate_size=4096"),
        (mamba2_state_shapes, GRANITE_MICRO | DS | {"intermediate_size": 96}, "tp=3 does not divide num_heads=64"),
        (gated_delta_net_state_shapes, QWEN_9B | DS, "tp=3 does not divide num_k_heads=16"),
        (gated_delta_net_state_shapes, QWEN_9B | DS | {"num_k_heads": 3}, "tp=3 does not divide num_v_heads=32"),
        (kda_state_shapes, KIMI_LINEAR | DS, "tp=3 does not divide num_heads=32"),
        (short_conv_state_shapes, LFM2 | DS, "tp=3 does not divide dim=2048"),
        (linear_attention_state_shapes, MINIMAX, "tp=3 does not divide num_heads=64"),
    ],
)
def test_indivisible_degree_names_the_size(family: Family, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        family(**sizes | {"tp": 3})
