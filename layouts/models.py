"""The catalogue: Mamba states of published models, as tests, demo and benchmarks use them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from layouts.conv_state import ConvStateLayout
from layouts.shapes import StateShape

_DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float32": np.dtype(np.float32)}


@dataclasses.dataclass(frozen=True)
class MambaModel:
    """The Mamba state of a model at tensor parallelism 1.

    Attributes:
      name: the model, in lower case.
      family: kind of Mamba layer: "mamba1", "mamba2", "gated_delta_net", "kda" or "short_conv".
      num_layers: Mamba layers.
      conv_dim: channels of the conv state.
      conv_kernel: taps of the causal conv.
      num_spec: draft tokens per step.
      temporal_shape: one temporal block, heads first; None where the layer has none.
      confirmed: whether the figures were checked against the published ones.
    """

    name: str
    family: str
    num_layers: int
    conv_dim: int
    conv_kernel: int
    num_spec: int
    temporal_shape: tuple[int, ...] | None
    confirmed: bool
    conv_dtype: str = "bfloat16"
    temporal_dtype: str = "float32"

    @property
    def state_len(self) -> int:
        """Tokens of a conv window."""
        return self.conv_kernel - 1 + self.num_spec

    def conv_block(self, conv_layout: ConvStateLayout | str, *, tp: int = 1) -> StateShape:
        """Returns one conv block of one of `tp` ranks."""
        layout = ConvStateLayout.parse(conv_layout)
        shape = layout.shape(1, _divide(self.name, "conv_dim", self.conv_dim, tp), self.state_len)[1:]
        return StateShape(shape, _DTYPES[self.conv_dtype])

    def temporal_block(self, *, tp: int = 1) -> StateShape | None:
        """Returns one temporal block of one of `tp` ranks, or None."""
        if self.temporal_shape is None:
            return None
        heads = _divide(self.name, "temporal_shape[0]", self.temporal_shape[0], tp)
        return StateShape((heads, *self.temporal_shape[1:]), _DTYPES[self.temporal_dtype])

    def state_bytes(self, *, tp: int = 1) -> int:
        """Returns the bytes of one request's running state on one of `tp` ranks, all layers."""
        temporal = self.temporal_block(tp=tp)
        conv_bytes = self.conv_block(ConvStateLayout.DS, tp=tp).num_bytes
        return self.num_layers * (conv_bytes + (temporal.num_bytes if temporal else 0))


def _divide(name: str, field: str, size: int, tp: int) -> int:
    if tp < 1 or size % tp:
        raise ValueError(f"tp={tp} does not divide {field}={size} of {name}")
    return size // tp


def model(name: str) -> MambaModel:
    """Returns a model of the catalogue.

    Raises:
      ValueError: `name` is not in it; the message lists the names.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; the catalogue has {', '.join(MODELS)}")
    return MODELS[name]


def _catalogue(*models: MambaModel) -> dict[str, MambaModel]:
    return {entry.name: entry for entry in models}


MODELS = _catalogue(
    MambaModel("nemotron-3-nano-30b-a3b", "mamba2", 23, 6144, 4, 1, (64, 64, 128), True),
    MambaModel("nemotron-3-super-120b-a12b", "mamba2", 40, 10240, 4, 1, (128, 64, 128), True),
    MambaModel("nemotron-3-ultra-550b-a55b", "mamba2", 48, 18432, 4, 1, (256, 64, 128), True),
    MambaModel("nemotron-h-8b", "mamba2", 24, 10240, 4, 1, (128, 64, 128), False),
    MambaModel("nemotron-h-47b", "mamba2", 44, 20480, 4, 1, (256, 64, 256), False),
    MambaModel("qwen3-next-80b-a3b", "gated_delta_net", 36, 8192, 4, 2, (32, 128, 128), False),
    MambaModel("qwen3.5-0.8b", "gated_delta_net", 18, 6144, 4, 2, (16, 128, 128), True),
    MambaModel("qwen3.5-9b", "gated_delta_net", 24, 8192, 4, 2, (32, 128, 128), True),
    MambaModel("qwen3.5-35b-a3b", "gated_delta_net", 30, 8192, 4, 2, (32, 128, 128), True),
    MambaModel("qwen3.5-27b", "gated_delta_net", 48, 10240, 4, 3, (48, 128, 128), True),
    MambaModel("qwen3.5-122b-a10b", "gated_delta_net", 36, 12288, 4, 2, (64, 128, 128), True),
    MambaModel("qwen3.5-397b-a17b", "gated_delta_net", 45, 12288, 4, 2, (64, 128, 128), True),
    MambaModel("kimi-linear-48b-a3b", "kda", 20, 12288, 4, 1, (32, 128, 128), True),
    MambaModel("kimi-k3", "kda", 69, 36864, 4, 7, (96, 128, 128), True),
    MambaModel("jamba-1.5-mini", "mamba1", 28, 8192, 4, 0, (8192, 16), False),
    MambaModel("bamba-9b", "mamba2", 29, 8448, 4, 0, (128, 64, 128), False),
    MambaModel("falcon-h1-7b", "mamba2", 44, 3584, 4, 0, (24, 128, 256), True),
    MambaModel("falcon-h1-34b", "mamba2", 72, 5120, 4, 0, (32, 128, 256), True),
    MambaModel("granite-4.0-h-micro", "mamba2", 36, 4352, 4, 0, (64, 64, 128), True),
    MambaModel("granite-4.0-h-tiny", "mamba2", 36, 3328, 4, 0, (48, 64, 128), True),
    MambaModel("granite-4.0-h-small", "mamba2", 36, 8448, 4, 0, (128, 64, 128), False),
    MambaModel("zamba2-7b", "mamba2", 81, 7424, 4, 0, (112, 64, 64), False),
    MambaModel("lfm2-1.2b", "short_conv", 10, 2048, 3, 0, None, True),
    MambaModel("codestral-mamba-7b", "mamba2", 64, 10240, 4, 0, (128, 64, 128), False),
)
