"""vLLM's own answers, bit for bit: steps computed by its Triton kernels. See data/README.md."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, as_bytes, assert_same_bytes, run

from layouts import ConvStateLayout, MambaState
from pallas_kernels import PostprocessInputs, PreprocessInputs

_DATA = np.load(pathlib.Path(__file__).parent / "data" / "vllm_0_33_cases.npz")
_CASES = list(enumerate(json.loads(_DATA["cases"].tobytes())))
_EACH = [pytest.param(i, case, id=f"{i}-{case['op']}-{case['layout']}") for i, case in _CASES]


def _states(i: int, case: dict[str, Any], *, after: bool) -> list[MambaState]:
    """The pools of all layers before the step, or after it."""

    def pool(layer: int, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        data = _DATA[f"{i}/before/{layer}/{kind}"].copy()
        if after:
            data[_DATA[f"{i}/changed/{layer}/{kind}/index"]] = _DATA[f"{i}/changed/{layer}/{kind}/value"]
        return data.view(np.dtype(getattr(jnp, case[f"{kind}_dtype"]))).reshape(shape)

    conv_shape = ConvStateLayout(case["layout"]).shape(case["num_blocks"], case["dim"], case["state_len"])
    temporal_shape = (case["num_blocks"], *case["temporal_shape"])
    return [
        MambaState(
            conv=pool(layer, "conv", conv_shape),
            temporal=pool(layer, "temporal", temporal_shape),
            group=layer % case["groups"],
        )
        for layer in range(len(case["changed_bytes"]) // 2)
    ]


def _inputs(i: int) -> tuple[PostprocessInputs | PreprocessInputs, np.ndarray]:
    prefix = f"{i}/in/"
    vectors = {name.removeprefix(prefix): _DATA[name] for name in _DATA.files if name.startswith(prefix)}
    tables = vectors.pop("block_tables")
    return (PreprocessInputs if "query_start_loc" in vectors else PostprocessInputs)(**vectors), tables


def test_golden_cases_are_all_there() -> None:
    assert [case["op"] for _, case in _CASES] == ["post", "post_advanced", "pre"] * 14


@pytest.mark.parametrize(("i", "case"), _EACH)
def test_oracle_gives_the_bytes_of_vllm(i: int, case: dict[str, Any]) -> None:
    _check("oracle", i, case, keep_temporal=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("i", "case"), _EACH)
def test_implementation_gives_the_bytes_of_vllm(implementation: str, i: int, case: dict[str, Any]) -> None:
    temporal = _states(i, case, after=False)[0].temporal
    fits = implementation == "xla" or temporal[0].nbytes % 16 == 0
    if not fits:
        with pytest.raises(NotImplementedError, match=r"states\[0\]\.temporal has blocks of \d+ bytes"):
            _check(implementation, i, case, keep_temporal=True)
    _check(implementation, i, case, keep_temporal=fits)


def _check(implementation: str, i: int, case: dict[str, Any], *, keep_temporal: bool) -> None:
    before, after = _states(i, case, after=False), _states(i, case, after=True)
    changed = [
        int((as_bytes(a) != as_bytes(b)).sum())
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    assert changed == case["changed_bytes"]
    if not keep_temporal:
        before, after = (
            [MambaState(conv=state.conv, group=state.group) for state in states] for states in (before, after)
        )
    inputs, tables = _inputs(i)
    got = run(
        case["op"].removesuffix("_advanced"),
        implementation,
        before,
        inputs,
        tables,
        block_size=case["block_size"],
        conv_layout=case["layout"],
        null_block_id=None,
    )
    names = ["mamba_state_idx", "num_accepted_tokens"] if case["op"] == "pre" else ["num_accepted_tokens"]
    assert_same_bytes(got, (after, *(_DATA[f"{i}/out/{name}"] for name in names)))
