"""vLLM's fused Mamba state copy for JAX, as one Pallas GPU kernel inside `jax.jit`."""

from pallas_kernels.config import KernelConfig
from pallas_kernels.inputs import PostprocessInputs, PreprocessInputs
from pallas_kernels.selection import Selection, select_implementation
from pallas_kernels.sharded import shard_operation
from pallas_kernels.state_copy import aligned_state_indices, copy_mamba_blocks, postprocess_mamba, preprocess_mamba
from pallas_kernels.state_copy_ref import copy_mamba_blocks_ref, postprocess_mamba_ref, preprocess_mamba_ref

__all__ = [
    "KernelConfig",
    "PostprocessInputs",
    "PreprocessInputs",
    "Selection",
    "aligned_state_indices",
    "copy_mamba_blocks",
    "copy_mamba_blocks_ref",
    "postprocess_mamba",
    "postprocess_mamba_ref",
    "preprocess_mamba",
    "preprocess_mamba_ref",
    "select_implementation",
    "shard_operation",
]
