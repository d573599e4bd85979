"""Operations on a mesh: results of one device, no communication, donation kept."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    OPERATIONS,
    Case,
    Conv,
    Layer,
    Temporal,
    assert_same_bytes,
    random_arguments,
    random_states,
    run,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from layouts import MambaState, index_specs, partition_specs
from pallas_kernels import postprocess_mamba, shard_operation

_LAYERS = (
    Layer(Conv(64, 4), Temporal((4, 16))),
    None,
    Layer(Conv(32, 4), num_layers=2),
    Layer(temporal=Temporal((8,))),
)
_COLLECTIVES = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute")


def _mesh(axis_type: AxisType, shape: tuple[int, ...], devices: Any = None) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(axis_type,) * 2, devices=devices)


def _put(mesh: jax.sharding.Mesh, values: Any, specs: Any) -> Any:
    return jax.tree.map(lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec)), values, specs)


def _rank_arguments(case: Case, ranks: int) -> list[tuple[Any, dict[str, Any]]]:
    """Arguments of each data rank: the same shapes, other values."""
    return [random_arguments(dataclasses.replace(case, seed=case.seed + rank)) for rank in range(ranks)]


def _join(per_rank: list[Any], specs: Any) -> Any:
    """The ranks' arrays as the global ones, one rank after the other along the data axis."""

    def join(spec: P, *parts: Any) -> Any:
        return np.concatenate(parts, axis=spec.index("data")) if "data" in spec else parts[0]

    return jax.tree.map(join, specs, *per_rank, is_leaf=lambda node: isinstance(node, P))


def _check(
    mesh: jax.sharding.Mesh, case: Case, layout: str, data_ranks: int, implementation: str, *, eager: bool = False
) -> None:
    rng = np.random.default_rng(0)
    states = [random_states(rng, case.layers, layout) for _ in range(data_ranks)]
    per_rank = _rank_arguments(case, data_ranks)
    arguments = [entry[0] for entry in per_rank]
    options = per_rank[0][1]
    traced = [{name: entry[1][name] for name in ("idx_mapping",) if name in entry[1]} for entry in per_rank]
    options = {name: value for name, value in options.items() if name not in ("idx_mapping", "num_reqs", "num_copies")}
    want = [
        run(case.operation, "oracle", one, *args, conv_layout=layout, **mapping, **options)
        for one, args, mapping in zip(states, arguments, traced, strict=True)
    ]
    specs = partition_specs(states[0], conv_layout=layout, tensor_axis="tensor", data_axis="data")
    argument_specs, traced_specs = index_specs((arguments[0], traced[0]), data_axis="data")
    sharded_states = _put(mesh, _join(states, specs), specs)
    sharded_arguments = _put(mesh, _join(arguments, argument_specs), argument_specs)
    sharded_traced = _put(mesh, _join(traced, traced_specs), traced_specs)
    operation = shard_operation(
        OPERATIONS[case.operation][0],
        mesh,
        conv_layout=layout,
        tensor_axis="tensor",
        data_axis="data",
        implementation=implementation,
        **options,
    )
    if eager:
        got = operation(sharded_states, *sharded_arguments, **sharded_traced)
    else:
        jitted = jax.jit(lambda states, args, traced: operation(states, *args, **traced), donate_argnums=0)
        compiled = jitted.lower(sharded_states, sharded_arguments, sharded_traced).compile()
        assert not _COLLECTIVES.search(compiled.as_text())
        got = compiled(sharded_states, sharded_arguments, sharded_traced)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(sharded_states))
    vector = P("data")
    out_specs = specs if case.operation == "copy" else (specs, *[vector] * (len(want[0]) - 1))
    assert_same_bytes(jax.device_get(got), _join(want, out_specs))
    for leaf, spec in zip(jax.tree.leaves(got), jax.tree.leaves(out_specs), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


_STEPS = [
    Case("post", _LAYERS),
    Case("mapped", _LAYERS, mapped=True, extra_slots=2),
    Case("pre", _LAYERS, operation="pre"),
    Case("copy", _LAYERS, operation="copy", batch=8),
]


# Explicit axes on the mesh that has both of them: XLA partitions as it does for Auto ones.
_MESHES = [
    (AxisType.Auto, (1, 4)),
    (AxisType.Auto, (2, 2)),
    (AxisType.Auto, (4, 1)),
    (AxisType.Explicit, (2, 2)),
]


@pytest.mark.parametrize("layout", ["DS", "SD"])
@pytest.mark.parametrize(("axis_type", "shape"), _MESHES, ids=str)
@pytest.mark.parametrize("case", _STEPS, ids=[case.name for case in _STEPS])
def test_mesh_gives_the_bytes_of_one_device_without_collectives(
    case: Case, axis_type: AxisType, shape: tuple[int, int], layout: str
) -> None:
    _check(_mesh(axis_type, shape, jax.devices("cpu")), case, layout, shape[0], "xla")


def test_eager_call_on_a_mesh_works() -> None:
    _check(_mesh(AxisType.Auto, (2, 2), jax.devices("cpu")), _STEPS[0], "DS", 2, "xla", eager=True)


@pytest.mark.gpu
@pytest.mark.skipif(jax.device_count() < 2 or jax.default_backend() != "gpu", reason="Needs two GPUs in one host.")
@pytest.mark.parametrize("layout", ["DS", "SD"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", _STEPS, ids=[case.name for case in _STEPS])
def test_two_gpus_give_the_bytes_of_one(case: Case, axis_type: AxisType, shape: tuple[int, int], layout: str) -> None:
    _check(_mesh(axis_type, shape, jax.devices()[:2]), case, layout, shape[0], "mosaic_gpu")


@pytest.mark.parametrize("case", _STEPS, ids=[case.name for case in _STEPS])
def test_kernel_lowers_for_cuda_under_a_mesh(case: Case) -> None:
    mesh = _mesh(AxisType.Auto, (2, 2), jax.devices("cpu"))
    states = random_states(np.random.default_rng(0), case.layers, "DS")
    arguments, options = random_arguments(case)
    traced = {name: options.pop(name) for name in ("idx_mapping", "num_reqs", "num_copies") if name in options}
    operation = shard_operation(
        OPERATIONS[case.operation][0],
        mesh,
        conv_layout="DS",
        tensor_axis="tensor",
        implementation="mosaic_gpu",
        **options,
    )
    lowered = jax.jit(lambda *args: operation(*args, **traced)).trace(states, *arguments)
    assert lowered.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 1


def test_specs_follow_layout_and_stacking() -> None:
    states = {
        "a": MambaState(conv=jnp.zeros((8, 16, 4)), temporal=jnp.zeros((8, 4, 2, 2))),
        "b": MambaState(conv=(jnp.zeros((3, 8, 16, 4)),), temporal=jnp.zeros((3, 8)), group=1, stacked=True),
        "c": None,
    }
    specs = partition_specs(states, conv_layout="DS", tensor_axis="tp", data_axis="dp")
    assert specs["a"] == MambaState(conv=P("dp", "tp", None), temporal=P("dp", "tp"))
    assert specs["b"] == MambaState(conv=(P(None, "dp", "tp", None),), temporal=P(None, "dp"), group=1, stacked=True)
    assert specs["c"] is None
    assert partition_specs(states, conv_layout="SD", tensor_axis="tp")["a"].conv == P(None, None, "tp")


def test_index_specs_slice_rows_and_replicate_scalars() -> None:
    arrays = (jnp.zeros(4), jnp.zeros((4, 2)), jnp.zeros((3, 4, 2)), jnp.int32(3))
    assert index_specs(arrays, data_axis="dp") == (P("dp"), P("dp", None), P(None, "dp", None), P())


def _sharded_call(mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    case = next(case for case in CASES if case.name == "small_pools")
    states = random_states(np.random.default_rng(0), (Layer(Conv(64, 4)),), "DS")
    specs = partition_specs(states, conv_layout="DS", tensor_axis="tensor")
    return _put(mesh, states, specs), random_arguments(case)[0]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_concrete_sharded_pool_outside_shard_map_is_refused(axis_type: AxisType) -> None:
    states, arguments = _sharded_call(_mesh(axis_type, (2, 2), jax.devices("cpu")))
    with pytest.raises(ValueError, match=r"states\[0\]\.conv is sharded as .*shard_operation"):
        postprocess_mamba(states, *jax.tree.map(jnp.asarray, arguments), block_size=3, conv_layout="DS")
    assert not states[0].conv.is_deleted()


def test_traced_sharded_pool_on_explicit_axes_is_refused() -> None:
    mesh = _mesh(AxisType.Explicit, (2, 2), jax.devices("cpu"))
    states, arguments = _sharded_call(mesh)
    step = jax.jit(lambda states: postprocess_mamba(states, *arguments, block_size=3, conv_layout="DS"))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"states\[0\]\.conv is sharded as"):
        step.trace(states)


def test_kernel_under_a_checking_shard_map_says_what_to_set() -> None:
    mesh = _mesh(AxisType.Auto, (2, 2), jax.devices("cpu"))
    states, arguments = _sharded_call(mesh)
    specs = partition_specs(states, conv_layout="DS", tensor_axis="tensor")

    def step(states: Any) -> Any:
        return postprocess_mamba(states, *arguments, block_size=3, conv_layout="DS", implementation="mosaic_gpu")

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    with pytest.raises(NotImplementedError, match=r"check_vma=False"):
        jax.jit(sharded).trace(states)


def test_only_the_three_operations_are_sharded() -> None:
    with pytest.raises(ValueError, match="operation must be one of copy_mamba_blocks, postprocess_mamba"):
        shard_operation(print, _mesh(AxisType.Auto, (2, 2), jax.devices("cpu")), conv_layout="DS")


def test_static_options_go_to_shard_operation_and_not_to_its_result() -> None:
    mesh = _mesh(AxisType.Auto, (2, 2), jax.devices("cpu"))
    operation = shard_operation(postprocess_mamba, mesh, conv_layout="DS", block_size=3)
    with pytest.raises(TypeError, match=r"\['null_block_id'\] must be given to shard_operation, not to its result"):
        operation([], null_block_id=1)


def test_index_arrays_of_rank_4_are_refused() -> None:
    with pytest.raises(ValueError, match=r"index arrays have rank 0 to 3, got one of shape \(1, 1, 1, 1\)"):
        index_specs(jnp.zeros((1, 1, 1, 1)))
