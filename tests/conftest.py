"""Fixtures and rules for the whole suite."""

from collections.abc import Iterator

import jax

# This defines an option that is part of the key of compiled programs, and Pallas's interpreter imports it on its first
# run: what was compiled before, that run's own program included, would compile a second time.
import jax.experimental.pallas.fuser
import pytest

# Meshes are tested on CPU devices, which must be asked for before the first of them is used.
jax.config.update("jax_num_cpu_devices", 4)


def _gpu_reason() -> str | None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"The kernel runs on an NVIDIA GPU only, and the first device here is {device.device_kind}."
    if float(device.compute_capability) < 9.0:
        return f"The kernel needs compute capability 9.0, and {device.device_kind} has {device.compute_capability}."
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests where there is no GPU for them."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if reason := _gpu_reason():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_race_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """JAX 0.11 only prints the races that its GPU interpreter finds; 0.12 raises."""
    yield
    captured = capfd.readouterr()
    assert "RACE DETECTED" not in captured.out + captured.err
