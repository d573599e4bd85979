"""A small serving loop around the state copy: continuous batching, prefix-cached Mamba state and speculative decoding.

The extra `serving` brings the model (`mamba2-jax`). Start reading at `engine.py`, which walks through one step.
"""

from pallas_kernels.serving.blocks import BlockPool, block_keys
from pallas_kernels.serving.copies import Copies, FusedCopies, SeparateCopies
from pallas_kernels.serving.drafters import Drafter, NgramDrafter, ScriptedDrafter
from pallas_kernels.serving.engine import Engine, Request, Stats
from pallas_kernels.serving.mamba2 import SIZES, Mamba2
from pallas_kernels.serving.model import Cache, LanguageModel, empty_cache
from pallas_kernels.serving.reference import Decoded, agrees, decode_plainly
from pallas_kernels.serving.step import StepConfig

__all__ = [
    "SIZES",
    "BlockPool",
    "Cache",
    "Copies",
    "Decoded",
    "Drafter",
    "Engine",
    "FusedCopies",
    "LanguageModel",
    "Mamba2",
    "NgramDrafter",
    "Request",
    "ScriptedDrafter",
    "SeparateCopies",
    "Stats",
    "StepConfig",
    "agrees",
    "block_keys",
    "decode_plainly",
    "empty_cache",
]
