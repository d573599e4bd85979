"""The two conv state layouts: their names, their axes and the shapes that they give."""

import pytest

from layouts import ConvStateLayout


@pytest.mark.parametrize("name", ["DS", "SD"])
def test_parse_takes_the_name_of_a_layout(name: str) -> None:
    assert ConvStateLayout.parse(name).name == name


@pytest.mark.parametrize("layout", [ConvStateLayout.DS, ConvStateLayout.SD])
def test_parse_returns_a_layout_unchanged(layout: ConvStateLayout) -> None:
    assert ConvStateLayout.parse(layout) is layout


@pytest.mark.parametrize("wrong", ["ds", "NHWC", "", None, 0])
def test_parse_names_both_layouts_when_it_is_given_neither(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"^conv_layout must be 'DS' or 'SD', got ") as failure:
        ConvStateLayout.parse(wrong)  # type: ignore[arg-type]
    assert str(failure.value).endswith(repr(wrong))


def test_ds_keeps_the_tokens_of_a_channel_together() -> None:
    assert ConvStateLayout.DS.axes == ("num_blocks", "dim", "state_len")
    assert ConvStateLayout.DS.shape(7, 96, 3) == (7, 96, 3)
    assert ConvStateLayout.DS.dim_axis == 1
    assert ConvStateLayout.DS.token_axis == 2


def test_sd_keeps_the_channels_of_a_token_together() -> None:
    assert ConvStateLayout.SD.axes == ("num_blocks", "state_len", "dim")
    assert ConvStateLayout.SD.shape(7, 96, 3) == (7, 3, 96)
    assert ConvStateLayout.SD.dim_axis == 2
    assert ConvStateLayout.SD.token_axis == 1


def test_dims_reads_the_same_shape_differently_in_each_layout() -> None:
    assert ConvStateLayout.DS.dims((7, 96, 3)) == {"num_blocks": 7, "dim": 96, "state_len": 3}
    assert ConvStateLayout.SD.dims((7, 96, 3)) == {"num_blocks": 7, "state_len": 96, "dim": 3}


def test_dims_ignores_the_layer_axis_of_a_stacked_pool() -> None:
    assert ConvStateLayout.SD.dims((48, 7, 3, 96)) == {"num_blocks": 7, "state_len": 3, "dim": 96}


def test_dims_refuses_a_shape_with_too_few_axes() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ConvStateLayout.DS.dims((96, 3))
