"""The catalogue: Mamba states of published models, as tests, demo and benchmarks use them."""

import dataclasses

from layouts.conv_state import ConvStateLayout
from layouts.shapes import (
    LayerStateShapes,
    gated_delta_net_state_shapes,
    kda_state_shapes,
    mamba1_state_shapes,
    mamba2_state_shapes,
    short_conv_state_shapes,
)


@dataclasses.dataclass(frozen=True)
class MambaModel:
    """The Mamba state of a model at tensor parallelism 1.

    `str` of a model is its name, and says so when its figures are unconfirmed: print that beside any figure.

    Attributes:
      name: the model, in lower case.
      family: kind of Mamba layer: "mamba1", "mamba2", "gated_delta_net", "kda" or "short_conv".
      num_layers: Mamba layers.
      conv_dim: channels of the conv state.
      conv_kernel: taps of the causal conv.
      num_spec: draft tokens per step.
      temporal_shape: one temporal block, heads first; None where the layer has none.
      confirmed: whether the figures were checked against the published ones.
      conv_dtype: type of the conv state.
      temporal_dtype: type of the temporal state.
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

    def __str__(self) -> str:
        return self.name if self.confirmed else f"{self.name} (figures unconfirmed)"

    @property
    def state_len(self) -> int:
        """Tokens of a conv window."""
        return self.conv_kernel - 1 + self.num_spec

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one request's running state at tensor parallelism 1: a block of every state of all layers."""
        return self.num_layers * self.state_shapes().num_bytes

    def state_shapes(self, tp: int = 1, *, conv_layout: ConvStateLayout | str = ConvStateLayout.DS) -> LayerStateShapes:
        """Returns the states of one layer on one of `tp` ranks.

        The sizes that `layouts.shapes` wants follow from `conv_dim` and `temporal_shape`.

        Dims: as the function of the family says.

        Args:
          tp: tensor-parallel ranks.
          conv_layout: "DS", "SD" or a `ConvStateLayout`.

        Raises:
          ValueError: the model cannot be divided among `tp` ranks, or `conv_layout` names no layout.
        """
        conv = {
            "conv_kernel": self.conv_kernel,
            "tp": tp,
            "conv_layout": ConvStateLayout.parse(conv_layout),
            "num_spec": self.num_spec,
            "conv_dtype": self.conv_dtype,
        }
        both = conv | {"temporal_dtype": self.temporal_dtype}
        try:
            match self.family, self.temporal_shape:
                case "mamba1", (channels, state_size):
                    return mamba1_state_shapes(intermediate_size=channels, state_size=state_size, **both)
                case "mamba2", (num_heads, head_dim, state_size):
                    intermediate_size = num_heads * head_dim
                    return mamba2_state_shapes(
                        intermediate_size=intermediate_size,
                        n_groups=(self.conv_dim - intermediate_size) // (2 * state_size),
                        num_heads=num_heads,
                        head_dim=head_dim,
                        state_size=state_size,
                        **both,
                    )
                case "gated_delta_net", (num_v_heads, head_v_dim, head_k_dim):
                    return gated_delta_net_state_shapes(
                        num_k_heads=(self.conv_dim - num_v_heads * head_v_dim) // (2 * head_k_dim),
                        num_v_heads=num_v_heads,
                        head_k_dim=head_k_dim,
                        head_v_dim=head_v_dim,
                        **both,
                    )
                case "kda", (num_heads, head_dim, _):
                    return kda_state_shapes(num_heads=num_heads, head_dim=head_dim, **both)
                case "short_conv", None:
                    return short_conv_state_shapes(dim=self.conv_dim, **conv)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        raise ValueError(f"{self.name}: no family {self.family!r} with a temporal block {self.temporal_shape}")


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
