"""The narrow interface between the engine and a model.

Everything that the engine computes is to be in the order of plain decoding, whatever is speculated, cached or batched
together, if its tokens are to be identical to it: a sequence of one-token steps of the same padded batch.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from layouts import ConvStateLayout, LayerStateShapes


class Cache(NamedTuple):
    """The state of every row of a batch, outside the pools.

    Dims: B = batch, D = conv channels, K = conv kernel. Checkpoints have a leading axis, one entry per token.

    Attributes:
      conv: the last inputs of each layer's conv, `[B, D, K - 1]`.
      temporal: the temporal state of each layer, `[B, ...]`.
    """

    conv: tuple[jax.Array, ...]
    temporal: tuple[jax.Array, ...]


class LanguageModel(Protocol):
    """What the engine asks of a model, which must be hashable: it is static in the jitted step.

    Dims: B = batch, T = tokens, W = window = 1 + num_spec, V = vocabulary.
    """

    @property
    def num_layers(self) -> int:
        """Mamba layers."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def conv_kernel(self) -> int:
        """Taps of the conv."""

    def state_shapes(self, conv_layout: ConvStateLayout | str, num_spec: int) -> LayerStateShapes:
        """Returns the shapes of a layer's blocks."""

    def one_token(self, weights: Any, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """Feeds int32 `[B]`; returns logits `[B, V]` and the state after it, of the types of the pools.

        Plain decoding uses it, which the engine is compared with.
        """

    def prefill(self, weights: Any, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> Cache:
        """Advances row b by `tokens[b, :lengths[b]]`: int32 `[B, T]` and `[B]`."""

    def verify(self, weights: Any, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """Feeds int32 `[B, W]`; returns logits `[W, B, V]` and a checkpoint after each token, `[W, B, ...]`.

        Every row is fed W tokens; where it has fewer, what comes of the others is not used.
        """

    def shard(self, weights: Any, mesh: jax.sharding.Mesh, axis: str) -> Any:
        """Returns the weights spread over a mesh axis."""


def empty_cache(model: LanguageModel, batch: int) -> Cache:
    """Returns the state before the first token: zeros."""
    shapes = model.state_shapes(ConvStateLayout.DS, num_spec=0)

    def zeros(block: Any) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((batch, *block.shape), block.dtype) for _ in range(model.num_layers))

    return Cache(conv=zeros(shapes.conv), temporal=zeros(shapes.temporal))
