"""What is timed: a model's pools and a batch of which some requests copy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layouts import MambaModel, MambaState, StateShape
from pallas_kernels.inputs import PostprocessInputs, PreprocessInputs

_BLOCK_SIZE = 16


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
    """

    model: MambaModel
    layout: str
    tp: int
    operation: str
    num_reqs: int
    num_copying: int
    offset: int

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
    def static_options(self) -> dict[str, Any]:
        """Static options of the operation."""
        options: dict[str, Any] = {"conv_layout": self.layout}
        return options if self.operation == "copy" else options | {"block_size": _BLOCK_SIZE}

    def arguments(self) -> tuple[Any, ...]:
        """The operation's arguments behind the states. Copying requests own three blocks each, at random."""
        rows = np.arange(self.num_reqs)
        copying = rows < self.num_copying
        ids = 1 + np.random.default_rng(0).permutation(3 * self.num_copying)
        src, dst, temporal = np.zeros((3, self.num_reqs), np.int32)
        src[copying], dst[copying], temporal[copying] = ids.reshape(3, -1)
        if self.operation == "copy":
            arrays = (src, dst, np.full(self.num_reqs, self.offset), temporal)
            return tuple(jnp.asarray(array, jnp.int32) for array in arrays)
        table = np.zeros((self.num_reqs, self.offset + 2), np.int32)
        accepted = np.where(copying, self.offset + 1, 1)
        if self.operation == "post":
            # The boundary after the first column lies `offset` tokens beyond the certain ones.
            table[:, 1 + self.offset], table[:, 1], table[:, 0] = temporal, src, dst
            vectors = {
                "mamba_state_idx": copying.astype(np.int32),
                "num_computed_tokens": np.where(copying, _BLOCK_SIZE - self.offset - 1, 3),
                "num_scheduled_tokens": np.full(self.num_reqs, 1 + self.model.num_spec),
                "num_draft_tokens": np.full(self.num_reqs, self.model.num_spec),
            }
            kind = PostprocessInputs
        else:
            # The next token runs in the column behind the accepted checkpoint's.
            table[:, self.offset], table[:, 0], table[:, self.offset + 1] = temporal, src, dst
            vectors = {
                "mamba_state_idx": np.zeros(self.num_reqs),
                "num_computed_tokens": np.where(copying, _BLOCK_SIZE * (self.offset + 1), 3),
                "query_start_loc": np.arange(self.num_reqs + 1),
            }
            kind = PreprocessInputs
        vectors["num_accepted_tokens"] = accepted
        if not self.offset:
            table[:, 1 if self.operation == "post" else 0] = src
        return kind(**{name: jnp.asarray(v, jnp.int32) for name, v in vectors.items()}), jnp.asarray(table)

    def states(self, *, num_layers: int | None = None) -> list[MambaState]:
        """Pools of random bits as refs, so that a step can be repeated. Fewer layers make a quick check."""

        def pool(key: jax.Array, block: StateShape) -> Any:
            words = jax.random.bits(key, (1 + 3 * self.num_copying, block.num_bytes // 4), jnp.uint32)
            return jax.new_ref(words.view(block.dtype).reshape(-1, *block.shape))

        states = []
        for key in jax.random.split(jax.random.key(0), num_layers or self.model.num_layers):
            pools = [pool(k, block) for k, block in zip(jax.random.split(key), self.blocks, strict=False)]
            states.append(MambaState(conv=pools[0], temporal=pools[1] if len(pools) > 1 else None))
        return states
