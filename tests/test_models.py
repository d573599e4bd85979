"""The catalogue against published figures."""

import dataclasses

import numpy as np
import pytest

from layouts import MODELS, LayerStateShapes, StateShape, model

BF16, F32 = np.dtype("bfloat16"), np.dtype("float32")

# MiB of a request, and the conv and temporal block of a layer in the DS layout, all at tensor parallelism 1.
FIGURES = {
    "nemotron-3-nano-30b-a3b": (47.08, (6144, 4), (64, 64, 128)),
    "nemotron-3-super-120b-a12b": (163.12, (10240, 4), (128, 64, 128)),
    "nemotron-3-ultra-550b-a55b": (390.75, (18432, 4), (256, 64, 128)),
    "nemotron-h-8b": (97.88, (10240, 4), (128, 64, 128)),
    "nemotron-h-47b": (710.88, (20480, 4), (256, 64, 256)),
    "qwen3-next-80b-a3b": (74.81, (8192, 5), (32, 128, 128)),
    "qwen3.5-0.8b": (19.05, (6144, 5), (16, 128, 128)),
    "qwen3.5-9b": (49.88, (8192, 5), (32, 128, 128)),
    "qwen3.5-35b-a3b": (62.34, (8192, 5), (32, 128, 128)),
    "qwen3.5-27b": (149.62, (10240, 6), (48, 128, 128)),
    "qwen3.5-122b-a10b": (148.22, (12288, 5), (64, 128, 128)),
    "qwen3.5-397b-a17b": (185.27, (12288, 5), (64, 128, 128)),
    "kimi-linear-48b-a3b": (41.88, (12288, 4), (32, 128, 128)),
    "kimi-k3": (462.52, (36864, 10), (96, 128, 128)),
    "jamba-1.5-mini": (15.31, (8192, 3), (8192, 16)),
    "bamba-9b": (117.4, (8448, 3), (128, 64, 128)),
    "falcon-h1-7b": (132.9, (3584, 3), (24, 128, 256)),
    "falcon-h1-34b": (290.11, (5120, 3), (32, 128, 256)),
    "granite-4.0-h-micro": (72.9, (4352, 3), (64, 64, 128)),
    "granite-4.0-h-tiny": (54.69, (3328, 3), (48, 64, 128)),
    "granite-4.0-h-small": (145.74, (8448, 3), (128, 64, 128)),
    "zamba2-7b": (145.19, (7424, 3), (112, 64, 64)),
    "lfm2-1.2b": (0.08, (2048, 2), None),
    "codestral-mamba-7b": (259.75, (10240, 3), (128, 64, 128)),
}


def test_every_model_of_the_catalogue_has_figures_here() -> None:
    assert list(MODELS) == list(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_state_of_a_request_has_the_published_size(name: str) -> None:
    assert round(model(name).bytes_per_request / 2**20, 2) == FIGURES[name][0]


@pytest.mark.parametrize("name", FIGURES)
def test_sizes_of_the_family_give_the_catalogue_entry(name: str) -> None:
    _, conv, temporal = FIGURES[name]
    entry = model(name)
    assert (entry.conv_dim, entry.state_len) == conv
    assert entry.state_shapes() == LayerStateShapes(
        conv=StateShape(conv, BF16), temporal=None if temporal is None else StateShape(temporal, F32)
    )


@pytest.mark.parametrize(
    ("name", "tp", "conv", "temporal"),
    [
        ("nemotron-3-ultra-550b-a55b", 4, (4608, 4), (64, 64, 128)),
        ("nemotron-3-ultra-550b-a55b", 8, (2304, 4), (32, 64, 128)),
        ("nemotron-3-super-120b-a12b", 8, (1280, 4), (16, 64, 128)),
        ("kimi-k3", 8, (4608, 10), (12, 128, 128)),
        ("qwen3.5-122b-a10b", 8, (1536, 5), (8, 128, 128)),
        ("qwen3.5-27b", 2, (5120, 6), (24, 128, 128)),
        ("qwen3.5-9b", 8, (1024, 5), (4, 128, 128)),
        ("jamba-1.5-mini", 8, (1024, 3), (1024, 16)),
        # One group of 128 states, whole on every rank: 8192 / 4 + 2 * 128 channels, not 8448 / 4.
        ("bamba-9b", 4, (2304, 3), (32, 64, 128)),
        # Two groups of 256 states, each on two ranks: 4096 / 4 + 2 * 256 channels, not 5120 / 4.
        ("falcon-h1-34b", 4, (1536, 3), (8, 128, 256)),
    ],
)
def test_states_are_divided_among_ranks(name: str, tp: int, conv: tuple[int, ...], temporal: tuple[int, ...]) -> None:
    shapes = model(name).state_shapes(tp, conv_layout="DS")
    assert (shapes.conv.shape, shapes.temporal.shape) == (conv, temporal)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_divides_by_eight_ranks_into_blocks_that_the_kernel_moves(name: str) -> None:
    shapes = model(name).state_shapes(8)
    for block in (shapes.conv, shapes.temporal):
        assert block is None or (block.num_bytes > 0 and block.num_bytes % 16 == 0)


def test_conv_is_oriented_by_layout() -> None:
    kimi = model("kimi-k3")
    assert kimi.state_shapes(8, conv_layout="DS").conv.shape == (4608, 10)
    assert kimi.state_shapes(8, conv_layout="SD").conv.shape == (10, 4608)
    assert kimi.state_shapes(8).conv.shape == (4608, 10)


def test_unconfirmed_figures_say_so() -> None:
    assert str(model("qwen3.5-9b")) == "qwen3.5-9b"
    assert str(model("bamba-9b")) == "bamba-9b (figures unconfirmed)"
    assert {name for name in MODELS if "unconfirmed" in str(MODELS[name])} == {
        "nemotron-h-8b",
        "nemotron-h-47b",
        "qwen3-next-80b-a3b",
        "jamba-1.5-mini",
        "bamba-9b",
        "granite-4.0-h-small",
        "zamba2-7b",
        "codestral-mamba-7b",
    }


def test_unknown_model_lists_the_catalogue() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt'; the catalogue has .*qwen3.5-9b"):
        model("gpt")


def test_indivisible_degree_is_refused_with_the_name_of_the_model() -> None:
    with pytest.raises(ValueError, match=r"^qwen3.5-9b: tp=3 does not divide num_k_heads=16$"):
        model("qwen3.5-9b").state_shapes(3)


def test_unknown_family_is_refused() -> None:
    rwkv = dataclasses.replace(model("qwen3.5-9b"), name="rwkv", family="rwkv7")
    with pytest.raises(ValueError, match=r"^rwkv: no family 'rwkv7' with a temporal block \(32, 128, 128\)$"):
        rwkv.state_shapes()
