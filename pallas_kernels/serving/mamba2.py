"""Mamba-2 from the PyPI package `mamba2-jax` as a model of the engine, with random weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from layouts import ConvStateLayout, LayerStateShapes, mamba2_state_shapes
from pallas_kernels.serving.model import Cache

try:
    from flax import nnx
    from mamba2_jax import Mamba2Cache, Mamba2Config, create_random_model
except ModuleNotFoundError as error:
    message = "pallas_kernels.serving needs mamba2-jax: install mamba-state-pallas with its extra 'serving'"
    raise ModuleNotFoundError(message, name=error.name) from error

SIZES = {
    "tiny": Mamba2Config(
        vocab_size=64, hidden_size=32, state_size=8, head_dim=8, num_hidden_layers=2, tie_word_embeddings=False
    ),
    # The geometry of state-spaces/mamba2-130m. The head is not tied: with random weights a tied one repeats one token.
    "130m": Mamba2Config(
        vocab_size=50288, hidden_size=768, state_size=128, head_dim=64, num_hidden_layers=24, tie_word_embeddings=False
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Mamba2:
    """A `mamba2_jax` model as a `LanguageModel`. Build one with `random`.

    Attributes:
      config: its sizes.
      graph: the module without its weights.
    """

    config: Mamba2Config
    graph: Any

    @classmethod
    @functools.cache
    def random(cls, size: str, seed: int = 0) -> tuple["Mamba2", Any]:
        """Returns a model of one of `SIZES` and its weights, a dict: random, and the same for the same seed.

        Raises:
          ValueError: `size` names nothing.
        """
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
        # A chunk of one token: the package pads every call to whole chunks.
        config = dataclasses.replace(SIZES[size], chunk_size=1)
        graph, weights = nnx.split(create_random_model(config, seed))
        return cls(config, graph), nnx.to_pure_dict(weights)

    @property
    def num_layers(self) -> int:
        """Mamba layers."""
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.config.vocab_size

    @property
    def conv_kernel(self) -> int:
        """Taps of the conv."""
        return self.config.conv_kernel

    def state_shapes(self, conv_layout: ConvStateLayout | str, num_spec: int) -> LayerStateShapes:
        """Returns the shapes of a layer's blocks, float32 throughout."""
        return mamba2_state_shapes(
            intermediate_size=self.config.intermediate_size,
            n_groups=1,
            num_heads=self.config.num_heads,
            head_dim=self.config.head_dim,
            state_size=self.config.state_size,
            conv_kernel=self.config.conv_kernel,
            tp=1,
            conv_layout=conv_layout,
            num_spec=num_spec,
            conv_dtype=jnp.float32,
        )

    def one_token(self, weights: Any, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """Feeds one token per row, int32 `[B]`; returns logits `[B, V]` and the state after it."""
        # Barriers keep XLA from fusing the step with what surrounds it, which differs from program to program.
        weights, cache, tokens = jax.lax.optimization_barrier((weights, cache, tokens))
        with jax.default_matmul_precision("highest"):
            model = nnx.merge(self.graph, weights)
            out = model(tokens[:, None], cache=Mamba2Cache(ssm_states=cache.temporal, conv_states=cache.conv))
        after = Cache(conv=tuple(out["cache"].conv_states), temporal=tuple(out["cache"].ssm_states))
        # One barrier each, so that logits that nobody reads are not computed.
        return jax.lax.optimization_barrier(out["logits"][:, 0]), jax.lax.optimization_barrier(after)

    def prefill(self, weights: Any, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> Cache:
        """Advances row b by `tokens[b, :lengths[b]]`, one token at a time, for as long as any row has some left."""

        def advance(i: jax.Array, cache: Cache) -> Cache:
            _, after = self.one_token(weights, cache, tokens[:, i])
            fed = i < lengths
            return jax.tree.map(lambda new, old: jnp.where(_per_row(fed, new), new, old), after, cache)

        return jax.lax.fori_loop(0, lengths.max(), advance, cache)

    def verify(self, weights: Any, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        """Feeds a window of tokens; returns the logits and the state after each."""

        def advance(cache: Cache, token: jax.Array) -> tuple[Cache, tuple[jax.Array, Cache]]:
            logits, cache = self.one_token(weights, cache, token)
            return cache, (logits, cache)

        return jax.lax.scan(advance, cache, tokens.T)[1]

    def shard(self, weights: Any, mesh: jax.sharding.Mesh, axis: str) -> Any:
        """Slices the weights by heads and channels, `out_proj` by its inputs; what does not divide is replicated.

        This only says where weights live: under `jax.jit` XLA places the computation and its all-reduces.
        """

        def place(path: Any, weight: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path)
            sliced = 0 if "out_proj" in name or "embedding" in name else weight.ndim - 1
            fits = ("mixer" in name or "lm_head" in name) and weight.shape[sliced] % mesh.shape[axis] == 0
            spec = [axis if fits and i == sliced else None for i in range(weight.ndim)]
            return jax.device_put(weight, NamedSharding(mesh, PartitionSpec(*spec)))

        return jax.tree_util.tree_map_with_path(place, weights)


def _per_row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector over rows in the rank of `like`."""
    return vector.reshape(-1, *[1] * (like.ndim - 1))
