"""vLLM's fused Mamba state copy for JAX, as one Pallas GPU kernel inside `jax.jit`."""

from pallas_kernels.config import KernelConfig
from pallas_kernels.inputs import PostprocessInputs
from pallas_kernels.selection import Selection, select_implementation
from pallas_kernels.state_copy import postprocess_mamba
from pallas_kernels.state_copy_ref import postprocess_mamba_ref

__all__ = [
    "KernelConfig",
    "PostprocessInputs",
    "Selection",
    "postprocess_mamba",
    "postprocess_mamba_ref",
    "select_implementation",
]
