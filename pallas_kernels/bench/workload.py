"""What is timed: a model's pools and a batch of which some requests copy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layouts import MambaModel, MambaState, StateShape
from pallas_kernels.inputs import PostprocessInputs, PreprocessInputs

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Workload:
    """One step of a model.

    Attributes:
      model: whose states are copied.
      layout: "DS" or "SD".
      tp: tensor-parallel degree; the pools are those of one rank.
      operation: "post", "pre" or "copy".
      num_reqs: requests in the batch.
      num_copying: how many of them copy.
      offset: tokens by which their windows shift.
      paired: request `i` copies block `2i` to block `2i+1` of pools without other blocks, as in vLLM's
        own measurements, instead of owning three blocks at random.
    """

    model: MambaModel
    layout: str
    tp: int
    operation: str
    num_reqs: int
    num_copying: int
    offset: int
    paired: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of each pool: those that are used and, for requests that do not copy, the null block."""
        return max(2 * self.num_copying, 1) if self.paired else 1 + 3 * self.num_copying

    @property
    def blocks(self) -> list[StateShape]:
        """One block of each pool of a layer."""
        shapes = self.model.state_shapes(self.tp, conv_layout=self.layout)
        return jax.tree.leaves((shapes.conv, shapes.temporal))

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written. A shifted DS window also reads what its destination keeps."""
        conv, *temporal = (block.num_bytes for block in self.blocks)
        if self.layout == "DS" and self.offset:
            windows = 3 * conv
        else:
            windows = 2 * conv * (self.model.state_len - self.offset) // self.model.state_len
        return self.num_copying * self.model.num_layers * (windows + 2 * sum(temporal))

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools."""
        return self.model.num_layers * self.num_blocks * sum(block.num_bytes for block in self.blocks)

    @property
    def static_options(self) -> dict[str, Any]:
        """Static options of the operation."""
        options: dict[str, Any] = {"conv_layout": self.layout}
        if self.paired:
            options["null_block_id"] = None  # Block 0 is one of the pairs.
        return options if self.operation == "copy" else options | {"block_size": BLOCK_SIZE}

    def arguments(self) -> tuple[Any, ...]:
        """The operation's arguments behind the states. Their shapes do not depend on who copies, or how far."""
        rows = np.arange(self.num_reqs)
        copying = rows < self.num_copying
        src, dst, temporal = np.zeros((3, self.num_reqs), np.int32)
        if self.paired:
            src[copying] = temporal[copying] = 2 * rows[copying]
            dst[copying] = 2 * rows[copying] + 1
        else:
            ids = 1 + np.random.default_rng(0).permutation(3 * self.num_copying)
            src[copying], dst[copying], temporal[copying] = ids.reshape(3, -1)
        if self.operation == "copy":
            arrays = (src, dst, np.full(self.num_reqs, self.offset), temporal)
            return tuple(jnp.asarray(array, jnp.int32) for array in arrays)
        table = np.zeros((self.num_reqs, max(self.offset, self.model.num_spec) + 2), np.int32)
        accepted = np.where(copying, self.offset + 1, 1)
        if self.operation == "post":
            # The boundary after the first column lies `offset` tokens beyond the certain ones.
            table[:, 1 + self.offset], table[:, 1], table[:, 0] = temporal, src, dst
            vectors = {
                "mamba_state_idx": copying.astype(np.int32),
                "num_computed_tokens": np.where(copying, BLOCK_SIZE - self.offset - 1, 3),
                "num_scheduled_tokens": np.full(self.num_reqs, 1 + self.model.num_spec),
                "num_draft_tokens": np.full(self.num_reqs, self.model.num_spec),
            }
            kind: type[PostprocessInputs | PreprocessInputs] = PostprocessInputs
        else:
            # The next token runs in the column behind the accepted checkpoint's.
            table[:, self.offset], table[:, 0], table[:, self.offset + 1] = temporal, src, dst
            vectors = {
                "mamba_state_idx": np.zeros(self.num_reqs),
                "num_computed_tokens": np.where(copying, BLOCK_SIZE * (self.offset + 1), 3),
                "query_start_loc": np.arange(self.num_reqs + 1),
            }
            kind = PreprocessInputs
        vectors["num_accepted_tokens"] = accepted
        if not self.offset:
            table[:, 1 if self.operation == "post" else 0] = src
        return kind(**{name: jnp.asarray(v, jnp.int32) for name, v in vectors.items()}), jnp.asarray(table)

    def states(self, *, num_layers: int | None = None) -> list[MambaState]:
        """Pools of random bits. Fewer layers make a quick check."""
        states = []
        for key in jax.random.split(jax.random.key(0), num_layers or self.model.num_layers):
            keys = jax.random.split(key, len(self.blocks))
            pools = [_random_pool(k, self.num_blocks, block) for k, block in zip(keys, self.blocks, strict=True)]
            states.append(MambaState(conv=pools[0], temporal=pools[1] if len(pools) > 1 else None))
        return states


def into_refs(states: list[MambaState]) -> list[MambaState]:
    """Turns arrays into refs, so that a step can be repeated, and empties `states`: both may not fit side by side."""
    refs = []
    while states:
        refs.append(jax.tree.map(jax.new_ref, states.pop(0)))
    return refs


@functools.partial(jax.jit, static_argnames=("num_blocks", "block"))
def _random_pool(key: jax.Array, num_blocks: int, block: StateShape) -> jax.Array:
    words = jax.random.bits(key, (num_blocks, block.num_bytes // 4), jnp.uint32)
    return words.view(block.dtype).reshape(num_blocks, *block.shape)
