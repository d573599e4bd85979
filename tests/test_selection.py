"""Which implementation runs, and the reason it gives."""

import jax
import jax.numpy as jnp
import pytest

from layouts import MambaState
from pallas_kernels import KernelConfig, select_implementation

_STATES = [MambaState(conv=jax.ShapeDtypeStruct((8, 64, 4), jnp.bfloat16))]
_ODD = [*_STATES, MambaState(temporal=jax.ShapeDtypeStruct((8, 3), jnp.float32))]


def _mesh(device_kind: str, platform: str = "gpu") -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind, 132, platform)
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


@pytest.mark.parametrize(
    ("device_kind", "platform", "name", "reason"),
    [
        ("NVIDIA H200", "gpu", "mosaic_gpu", "NVIDIA H200 has capability 9.0 and every leaf suits the kernel"),
        ("NVIDIA GH200 480GB", "gpu", "mosaic_gpu", "NVIDIA GH200 480GB has capability 9.0"),
        ("NVIDIA B200", "gpu", "mosaic_gpu", "NVIDIA B200 has capability 10.0"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "xla", "NVIDIA A100-SXM4-80GB has capability 8.0; the kernel needs 9.0"),
        ("Tesla T4", "gpu", "xla", "Tesla T4 has capability 7.5; the kernel needs 9.0"),
        ("gfx942", "gpu", "xla", "gfx942 is no NVIDIA GPU"),
        ("NVIDIA Unheard 1", "gpu", "xla", "NVIDIA Unheard 1 has an unknown compute capability"),
        ("TPU v6 lite", "tpu", "xla", "TPU v6 lite is no NVIDIA GPU"),
    ],
)
def test_device_of_the_abstract_mesh_decides(device_kind: str, platform: str, name: str, reason: str) -> None:
    with jax.sharding.use_abstract_mesh(_mesh(device_kind, platform)):
        selection = select_implementation(_STATES, conv_layout="DS")
    assert selection.name == name
    assert selection.reason.startswith(reason)


def test_leaf_that_prevents_the_kernel_is_named() -> None:
    with jax.sharding.use_abstract_mesh(_mesh("NVIDIA H200")):
        selection = select_implementation(_ODD, conv_layout="DS")
    assert selection.name == "xla"
    assert selection.reason == "states[1].temporal has blocks of 12 bytes; the kernel takes multiples of 16"


def test_named_kernel_is_refused_on_an_old_gpu() -> None:
    with (
        jax.sharding.use_abstract_mesh(_mesh("NVIDIA A100-SXM4-80GB")),
        pytest.raises(NotImplementedError, match=r"has compute capability 8\.0; the kernel needs 9.0"),
    ):
        select_implementation(_STATES, conv_layout="DS", implementation="mosaic_gpu")


def test_named_implementation_is_what_runs() -> None:
    assert select_implementation(_STATES, conv_layout="DS", implementation="xla").name == "xla"
    assert select_implementation(_STATES, conv_layout="DS", implementation="mosaic_gpu").name == "mosaic_gpu"


@pytest.mark.gpu
def test_kernel_is_the_default_on_a_gpu_that_has_it() -> None:
    assert select_implementation(_STATES, conv_layout="DS").name == "mosaic_gpu"


def test_configs_compare_by_value() -> None:
    assert KernelConfig(num_ctas=32) == KernelConfig(num_ctas=32)
    assert hash(KernelConfig(num_ctas=32)) == hash(KernelConfig(num_ctas=32))
