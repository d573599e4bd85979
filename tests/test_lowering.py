"""The kernel lowers for CUDA on a machine without a GPU: the interpreter takes more than Mosaic GPU does."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EVERY_STRUCTURE, OPERATIONS, Case, random_arguments, random_states

from layouts import MODELS, ConvStateLayout, MambaModel, MambaState, StateShape
from pallas_kernels import KernelConfig, PostprocessInputs, postprocess_mamba

# What an SM of an H200 has for its thread blocks, and what each of them takes besides its own (CUDA C++
# Programming Guide, "Compute Capability 9.0").
_SHARED_BYTES_OF_SM = 228 * 1024
_SHARED_BYTES_OF_LAUNCH = 1024
_NUM_SMS = 132


def _trace(operation: Callable[..., Any], states: Any, *arguments: Any, idx_mapping: Any = None, **options: Any) -> Any:
    def step(states: Any, arguments: Any, idx_mapping: Any) -> Any:
        # Not every operation takes a mapping.
        mapping = {} if idx_mapping is None else {"idx_mapping": idx_mapping}
        return operation(states, *arguments, implementation="mosaic_gpu", **mapping, **options)

    operands = (states, arguments, idx_mapping)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), operands)
    return jax.jit(step, donate_argnums=0).trace(*shapes)


def _lower(operation: Callable[..., Any], states: Any, *arguments: Any, **options: Any) -> str:
    traced = _trace(operation, states, *arguments, **options)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _launches(traced: Any) -> list[tuple[int, int, int]]:
    """Thread blocks, warpgroups and bytes of shared memory of every kernel that is launched."""
    launches = []
    for equation in _equations(traced.jaxpr.jaxpr):
        if "meshes" not in equation.params:
            continue
        (mesh,), (body,) = equation.params["meshes"], equation.params["jaxprs"]
        refs = [
            var.aval
            for inner in _equations(body)
            if inner.primitive.name == "run_scoped"
            for var in inner.params["jaxpr"].invars
        ]
        sizes = [math.prod(ref.shape) * (8 if "barrier" in str(ref.dtype) else ref.dtype.itemsize) for ref in refs]
        # Each array starts on a multiple of 1024 bytes.
        launches.append((math.prod(mesh.grid), mesh.num_threads, sum(-(-size // 1024) * 1024 for size in sizes)))
    return launches


@pytest.mark.parametrize(("case", "layout"), EVERY_STRUCTURE)
def test_every_structure_lowers_to_one_kernel(case: Case, layout: str) -> None:
    states = random_states(np.random.default_rng(0), case.layers, layout)
    arguments, options = random_arguments(case)
    with jax.enable_x64(case.x64):
        operation, _ = OPERATIONS[case.operation]
        text = _lower(operation, states, *arguments, conv_layout=layout, config=case.config, **options)
    assert text.count("custom_call @mosaic_gpu") == 1


def _request_shapes(batch: int, columns: int) -> tuple[PostprocessInputs, jax.ShapeDtypeStruct]:
    vector = jax.ShapeDtypeStruct((batch,), jnp.int32)
    inputs = PostprocessInputs(
        mamba_state_idx=vector,
        num_accepted_tokens=vector,
        num_computed_tokens=vector,
        num_scheduled_tokens=vector,
        num_draft_tokens=vector,
    )
    return inputs, jax.ShapeDtypeStruct((batch, columns), jnp.int32)


def _model_states(model: MambaModel, layout: str, *, tp: int, layers: int, num_blocks: int) -> list[MambaState]:
    def pool(block: StateShape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_blocks, *block.shape), block.dtype)

    shapes = model.state_shapes(tp, conv_layout=layout)
    return [
        MambaState(conv=jax.tree.map(pool, shapes.conv), temporal=jax.tree.map(pool, shapes.temporal))
        for _ in range(layers)
    ]


@pytest.mark.parametrize("layout", list(ConvStateLayout))
@pytest.mark.parametrize("name", MODELS)
def test_every_model_lowers_at_every_tensor_parallel_degree(name: str, layout: ConvStateLayout) -> None:
    inputs, tables = _request_shapes(batch=128, columns=8)
    # The pools of all degrees in one kernel: the planner in it lowers once, each geometry on its own.
    states = [_model_states(MODELS[name], layout.name, tp=tp, layers=1, num_blocks=64) for tp in (1, 2, 4, 8)]
    text = _lower(postprocess_mamba, states, inputs, tables, block_size=16, conv_layout=layout)
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("layout", list(ConvStateLayout))
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_one_launch_whose_thread_blocks_fit_the_device_at_once(
    name: str, layout: ConvStateLayout
) -> None:
    states = _model_states(MODELS[name], layout.name, tp=1, layers=1, num_blocks=64)
    # No batch takes more shared memory: a longer one is planned in chunks.
    traced = _trace(postprocess_mamba, states, *_request_shapes(512, 8), block_size=16, conv_layout=layout)
    ((num_ctas, num_warpgroups, shared_bytes),) = _launches(traced)
    assert (num_ctas, num_warpgroups) == (2 * _NUM_SMS, 4)
    assert 0 < 2 * (shared_bytes + _SHARED_BYTES_OF_LAUNCH) <= _SHARED_BYTES_OF_SM


@pytest.mark.parametrize("layout", list(ConvStateLayout))
@pytest.mark.parametrize("name", MODELS)
def test_every_model_fits_one_thread_block_per_sm_with_all_warpgroups(name: str, layout: ConvStateLayout) -> None:
    states = _model_states(MODELS[name], layout.name, tp=1, layers=1, num_blocks=64)
    options = {"block_size": 16, "conv_layout": layout, "config": KernelConfig(num_ctas=32)}
    ((num_ctas, num_warpgroups, shared_bytes),) = _launches(
        _trace(postprocess_mamba, states, *_request_shapes(512, 8), **options)
    )
    assert (num_ctas, num_warpgroups) == (32, 8)
    assert 0 < shared_bytes + _SHARED_BYTES_OF_LAUNCH <= _SHARED_BYTES_OF_SM


@pytest.mark.parametrize("layout", list(ConvStateLayout))
def test_code_grows_at_most_linearly_with_the_layers(layout: ConvStateLayout) -> None:
    def size(num_layers: int) -> int:
        states = _model_states(MODELS["qwen3.5-9b"], layout.name, tp=1, layers=num_layers, num_blocks=64)
        return len(_lower(postprocess_mamba, states, *_request_shapes(128, 8), block_size=16, conv_layout=layout))

    four, eight, sixteen = size(4), size(8), size(16)
    # Numbers with more digits and the like: a tenth.
    assert sixteen - eight <= 1.1 * 2 * (eight - four)


def test_code_of_stacked_layers_does_not_grow_with_them() -> None:
    def size(num_layers: int) -> int:
        (state,) = _model_states(MODELS["qwen3.5-9b"], "DS", tp=1, layers=1, num_blocks=64)
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_layers, *x.shape), x.dtype), state)
        stacked = [dataclasses.replace(stacked, stacked=True)]
        return len(_lower(postprocess_mamba, stacked, *_request_shapes(128, 8), block_size=16, conv_layout="DS"))

    assert size(48) <= 1.01 * size(4)


@pytest.mark.parametrize("layout", list(ConvStateLayout))
def test_conv_whose_channels_are_no_multiple_of_128_lowers(layout: ConvStateLayout) -> None:
    inputs, tables = _request_shapes(batch=128, columns=8)
    states = [MambaState(conv=jax.ShapeDtypeStruct(layout.shape(64, 2112, 3), jnp.bfloat16)) for _ in range(2)]
    text = _lower(postprocess_mamba, states, inputs, tables, block_size=16, conv_layout=layout)
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("batch", [1, 3, 4, 127, 128, 129, 512, 513, 1500])
def test_any_batch_size_lowers(batch: int) -> None:
    inputs, tables = _request_shapes(batch, columns=3)
    states = _model_states(MODELS["lfm2-1.2b"], "DS", tp=1, layers=1, num_blocks=64)
    _lower(postprocess_mamba, states, inputs, tables, block_size=16, conv_layout="DS")


def test_all_layers_of_a_model_lower_to_one_kernel() -> None:
    inputs, tables = _request_shapes(batch=128, columns=8)
    model = MODELS["nemotron-3-super-120b-a12b"]
    states = _model_states(model, "DS", tp=1, layers=model.num_layers, num_blocks=64)
    assert (
        _lower(postprocess_mamba, states, inputs, tables, block_size=16, conv_layout="DS").count(
            "custom_call @mosaic_gpu"
        )
        == 1
    )


def test_pool_beyond_two_gib_of_elements_lowers() -> None:
    inputs, tables = _request_shapes(batch=4, columns=2)
    states = [MambaState(temporal=jax.ShapeDtypeStruct((5000, 2**20), jnp.int8))]
    _lower(postprocess_mamba, states, inputs, tables, block_size=16, conv_layout="DS")
