"""Which implementation runs, and why."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from layouts import ConvStateLayout, assert_mamba_states
from pallas_kernels.config import DEFAULT_NUM_SMS
from pallas_kernels.pools import Pool, flatten_pools
from pallas_kernels.tiling import kernel_obstacle

MOSAIC_GPU = "mosaic_gpu"
XLA = "xla"
IMPLEMENTATIONS = (MOSAIC_GPU, XLA)

_MIN_CAPABILITY = 9.0
_OTHER_VENDORS = ("AMD", "GFX", "INTEL", "RADEON")
# Compute capability by product name, for abstract devices, which carry nothing else.
_CAPABILITY_OF_PRODUCT = {
    "H100": 9.0,
    "H200": 9.0,
    "H800": 9.0,
    "H20": 9.0,
    "B100": 10.0,
    "B200": 10.0,
    "B300": 10.3,
    "V100": 7.0,
    "T4": 7.5,
    "A100": 8.0,
    "A10": 8.6,
    "L4": 8.9,
    "L40": 8.9,
}


@dataclasses.dataclass(frozen=True)
class Selection:
    """The implementation of a call.

    Attributes:
      name: "mosaic_gpu" or "xla".
      reason: one sentence; names the leaf or the device that decided.
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class TargetDevice:
    """The device that a trace is for.

    Attributes:
      kind: its name.
      is_nvidia: whether it is an NVIDIA GPU.
      capability: its compute capability, None when unknown.
      num_sms: its SM count, an H200's when unknown.
    """

    kind: str
    is_nvidia: bool
    capability: float | None
    num_sms: int


def target_device() -> TargetDevice:
    """Returns the abstract mesh's device if one is set, else the default backend's first device."""
    local = jax.devices()[0]
    device = jax.sharding.get_abstract_mesh().abstract_device or local
    is_nvidia = device.platform in ("gpu", "cuda") and not device.device_kind.upper().startswith(_OTHER_VENDORS)
    capability = num_sms = None
    if is_nvidia and device.device_kind == local.device_kind:
        capability, num_sms = float(local.compute_capability), local.core_count
    elif is_nvidia:
        # A product's number behind one letter: H200 in "NVIDIA GH200 480GB", A100 in "NVIDIA A100-SXM4-80GB".
        products = re.findall(r"[A-Z]\d+", device.device_kind.upper())
        capability = next((_CAPABILITY_OF_PRODUCT[name] for name in products if name in _CAPABILITY_OF_PRODUCT), None)
        num_sms = device.num_cores
    return TargetDevice(device.device_kind, is_nvidia, capability, num_sms or DEFAULT_NUM_SMS)


def choose(
    pools: Sequence[Pool],
    conv_layout: ConvStateLayout,
    implementation: str | None,
    device: TargetDevice,
    *,
    interpreted: bool = False,
) -> Selection:
    """Resolves `implementation` for `pools` on `device`, whose compute capability does not matter when interpreted.

    Raises:
      ValueError: `implementation` names nothing.
      NotImplementedError: it names the kernel, and a leaf or the device rules the kernel out.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation == XLA:
        return Selection(XLA, "implementation='xla' was asked for")
    obstacle = next((found for pool in pools if (found := kernel_obstacle(pool, conv_layout))), None)
    too_old = not interpreted and device.capability is not None and device.capability < _MIN_CAPABILITY
    if implementation == MOSAIC_GPU:
        if too_old:
            obstacle = f"{device.kind} has compute capability {device.capability}; the kernel needs {_MIN_CAPABILITY}"
        if obstacle:
            raise NotImplementedError(f"implementation='mosaic_gpu': {obstacle}")
        return Selection(MOSAIC_GPU, "implementation='mosaic_gpu' was asked for")
    if not device.is_nvidia:
        return Selection(XLA, f"{device.kind} is no NVIDIA GPU")
    if device.capability is None or too_old:
        known = "an unknown compute capability" if device.capability is None else f"capability {device.capability}"
        return Selection(XLA, f"{device.kind} has {known}; the kernel needs {_MIN_CAPABILITY}")
    if obstacle:
        return Selection(XLA, obstacle)
    return Selection(MOSAIC_GPU, f"{device.kind} has capability {device.capability} and every leaf suits the kernel")


def select_implementation(
    states: Any, *, conv_layout: ConvStateLayout | str, implementation: str | None = None
) -> Selection:
    """Tells which implementation an operation on `states` runs here, and why.

    Args:
      states: pytree of `MambaState`; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      implementation: None, "mosaic_gpu" or "xla". Static.

    Returns:
      A `Selection` with `.name` and `.reason`; the reason names the leaf that prevents the kernel.

    Raises:
      AssertionError (contract): `states` is no pytree of well-formed MambaStates.
      ValueError: `conv_layout` or `implementation` names nothing.
      NotImplementedError: `implementation="mosaic_gpu"` cannot run, with the reason.
    """
    conv_layout = ConvStateLayout.parse(conv_layout)
    assert_mamba_states(states, conv_layout=conv_layout)
    return choose(flatten_pools(states)[0], conv_layout, implementation, target_device())
