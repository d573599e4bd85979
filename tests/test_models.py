"""The catalogue against published figures."""

import pytest

from layouts import MODELS, model


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("qwen3.5-9b", 49.88),
        ("nemotron-3-super-120b-a12b", 163.12),
        ("nemotron-3-nano-30b-a3b", 47.08),
        ("nemotron-3-ultra-550b-a55b", 390.75),
        ("kimi-k3", 462.52),
        ("zamba2-7b", 145.19),
        ("lfm2-1.2b", 0.08),
    ],
)
def test_state_of_a_request_has_the_published_size(name: str, mib: float) -> None:
    assert round(model(name).state_bytes() / 2**20, 2) == mib


def test_blocks_are_oriented_by_layout_and_divided_among_ranks() -> None:
    kimi = model("kimi-k3")
    assert kimi.state_len == 10
    assert kimi.conv_block("DS", tp=8).shape == (4608, 10)
    assert kimi.conv_block("SD", tp=8).shape == (10, 4608)
    assert kimi.temporal_block(tp=8).shape == (12, 128, 128)
    assert model("lfm2-1.2b").temporal_block() is None


def test_every_model_divides_by_eight_ranks() -> None:
    for entry in MODELS.values():
        assert entry.state_bytes(tp=8) * 8 == entry.state_bytes()


def test_unknown_model_lists_the_catalogue() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt'; the catalogue has .*qwen3.5-9b"):
        model("gpt")


def test_indivisible_degree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tp=3 does not divide conv_dim=8192 of qwen3.5-9b"):
        model("qwen3.5-9b").conv_block("DS", tp=3)
