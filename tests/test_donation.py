"""States are updated in place: what the compiled program may not contain, and what may not recompile."""

import re
import time
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, IMPLEMENTATIONS, OPERATIONS, Conv, Layer, Temporal, random_arguments, random_states

from layouts import ConvStateLayout, MambaState
from pallas_kernels import PostprocessInputs, postprocess_mamba

_HLO_TYPES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "u16": 2, "u32": 4, "s16": 2, "s32": 4, "u8": 1, "s8": 1}
_CASE = next(case for case in CASES if case.name == "small_pools")


def _compile(states: Any, layout: str, implementation: str | None) -> jax.stages.Compiled:
    inputs, tables = jax.tree.map(jnp.asarray, random_arguments(_CASE)[0])

    def step(states: Any, inputs: PostprocessInputs, tables: jax.Array) -> Any:
        return postprocess_mamba(
            states, inputs, tables, block_size=3, conv_layout=layout, implementation=implementation
        )

    return jax.jit(step, donate_argnums=0).lower(states, inputs, tables).compile()


def _large_results(hlo: str, min_bytes: int) -> list[str]:
    """Opcodes of instructions, fused ones too, with a result of at least `min_bytes`."""
    found = []
    for kind, dims, opcode in re.findall(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", hlo):
        size = int(np.prod([int(dim) for dim in dims.split(",") if dim])) * _HLO_TYPES.get(kind, 0)
        if size >= min_bytes:
            found.append(opcode)
    return found


def _pools(layout: str, num_blocks: int = 4096, copies: int = 2) -> list[MambaState]:
    layer = Layer(Conv(40, 5), Temporal((4, 64)), num_blocks=num_blocks)
    return jax.tree.map(jnp.asarray, random_states(np.random.default_rng(0), (layer,) * copies, layout))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", ["DS", "SD"])
def test_compiled_step_aliases_every_pool_and_does_nothing_pool_sized(implementation: str, layout: str) -> None:
    states = _pools(layout)
    smallest = min(leaf.nbytes for leaf in jax.tree.leaves(states))
    hlo = _compile(states, layout, implementation).as_text()
    assert len(re.findall(r"\{\d+\}: \(\d+, \{\}", hlo.split("input_output_alias")[1].split("\n")[0])) == 4
    opcodes = set(_large_results(hlo, smallest))
    assert opcodes & {"parameter"}, "the pattern finds the pools themselves"
    assert not opcodes & {
        "copy",
        "copy-start",
        "convert",
        "bitcast-convert",
        "select",
        "gather",
        "scatter",
        "concatenate",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["DS", "SD"])
@pytest.mark.parametrize("name", ["small_pools", "padded_batch", "pre", "copy", "mapped", "pre_mapped"])
def test_step_is_exactly_one_kernel_and_a_gather_when_mapped(name: str, layout: str) -> None:
    case = next(case for case in CASES if case.name == name)
    arguments, options = random_arguments(case)
    mapping, count = options.pop("idx_mapping", None), options.pop("num_reqs", None)
    options.pop("num_copies", None)

    def step(states: Any, arguments: Any, mapping: Any, count: Any) -> Any:
        traced = {"idx_mapping": mapping, "num_reqs": count}
        traced = {name: value for name, value in traced.items() if value is not None}
        return OPERATIONS[case.operation][0](states, *arguments, conv_layout=layout, **traced, **options)

    operands = jax.tree.map(jnp.asarray, (_pools(layout, 64), arguments, mapping, count))
    hlo = jax.jit(step, donate_argnums=0).lower(*operands).compile().as_text()
    entry = hlo.split("ENTRY ")[1]
    opcodes = re.findall(r"^\s*(?:ROOT )?%?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", entry, re.MULTILINE)
    kernels = [op for op in opcodes if op not in {"parameter", "bitcast", "get-tuple-element", "tuple", "constant"}]
    assert kernels == (["fusion", "custom-call"] if mapping is not None else ["custom-call"])
    assert "mosaic_gpu" in entry


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_time_does_not_grow_with_the_pool(implementation: str) -> None:
    def seconds(num_blocks: int) -> float:
        states = _pools("DS", num_blocks)
        inputs, tables = jax.tree.map(jnp.asarray, random_arguments(_CASE)[0])
        step = _compile(states, "DS", implementation)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            states, _ = jax.block_until_ready(step(states, inputs, tables))
            times.append(time.perf_counter() - start)
        return min(times)

    small, large = seconds(64), seconds(64 * 512)
    assert large < 5 * small + 1e-3, f"{small * 1e6:.0f} us with 64 blocks, {large * 1e6:.0f} us with 512 times as many"


def test_arrays_are_donated_and_the_counter_is_new() -> None:
    states, (inputs, tables) = _pools("DS", 64), jax.tree.map(jnp.asarray, random_arguments(_CASE)[0])
    _, counter = postprocess_mamba(states, inputs, tables, block_size=3, conv_layout="DS", implementation="xla")
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))
    assert not inputs.num_accepted_tokens.is_deleted()
    assert counter.unsafe_buffer_pointer() != inputs.num_accepted_tokens.unsafe_buffer_pointer()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_refs_are_updated_in_place_and_returned(implementation: str) -> None:
    arrays, (inputs, tables) = _pools("DS", 64), jax.tree.map(jnp.asarray, random_arguments(_CASE)[0])
    mixed = [MambaState(conv=jax.new_ref(arrays[0].conv), temporal=arrays[0].temporal + 0), arrays[1]]
    options = {"interpret": True} if implementation == "interpret" else {"implementation": implementation}
    want, _ = postprocess_mamba(
        jax.tree.map(jnp.array, arrays), inputs, tables, block_size=3, conv_layout="DS", implementation="xla"
    )
    got, _ = postprocess_mamba(mixed, inputs, tables, block_size=3, conv_layout="DS", **options)
    assert got[0].conv is mixed[0].conv
    np.testing.assert_array_equal(got[0].conv[...].view(jnp.uint16), want[0].conv.view(jnp.uint16))
    np.testing.assert_array_equal(got[1].conv.view(jnp.uint16), want[1].conv.view(jnp.uint16))


def _count_traces(call: Callable[[], Any]) -> int:
    traces = []

    def listen(event: str, duration_secs: float, **metadata: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traces.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(traces)


def test_only_new_shapes_and_statics_trace_again() -> None:
    def call(layout: Any, num_reqs: Any, accepted: int = 2, null_block_id: Any = 0, size: int = 64) -> None:
        inputs, tables = jax.tree.map(jnp.asarray, random_arguments(_CASE)[0])
        inputs = jax.tree.map(lambda vector: vector * 0 + accepted, inputs)
        postprocess_mamba(
            _pools("DS", size),
            inputs,
            tables,
            block_size=np.int64(3),
            conv_layout=layout,
            num_reqs=num_reqs,
            null_block_id=null_block_id,
            implementation="xla",
        )

    five = jnp.int32(5)
    call("DS", 3)
    assert _count_traces(lambda: call("DS", 5, accepted=3)) == 0
    assert _count_traces(lambda: call(ConvStateLayout.DS, 5)) == 0
    assert _count_traces(lambda: call("DS", five, null_block_id=np.int32(0))) == 0
    assert _count_traces(lambda: call("DS", 5, size=65)) > 0, "the count sees a trace"


def test_traced_num_reqs_and_values_do_not_trace_again() -> None:
    states, (inputs, tables) = _pools("DS", 64), jax.tree.map(jnp.asarray, random_arguments(_CASE)[0])

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(states: Any, inputs: PostprocessInputs, tables: jax.Array, num_reqs: jax.Array) -> Any:
        return postprocess_mamba(
            states, inputs, tables, block_size=3, conv_layout="DS", num_reqs=num_reqs, implementation="xla"
        )

    for num_reqs in range(4):
        states, _ = step(states, inputs, tables, num_reqs)
