"""Blocks of the pools: who holds them, which are published in the prefix cache, and which go first.

A block id names the same block in the pools of all layers. Block 0 is the null block: it belongs to nobody, and what is
written to it is never read. The other blocks are in one of three places: held by requests (a reference count), free, or
published and held by nobody, where they wait to be shared again or evicted, least recently used first.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

NULL_BLOCK = 0


def block_keys(tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Returns the key of every complete block: a hash chain, so that equal keys mean equal tokens from the start.

    Args:
      tokens: all tokens of a request.
      block_size: tokens per block.
      known: keys of its first blocks, computed before.
    """
    keys = list(known)
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        chunk = np.asarray(tokens[start : start + block_size], np.int32)
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + chunk.tobytes()).digest())
    return keys


class BlockPool:
    """Allocates blocks and finds published ones by their key.

    Attributes:
      num_evictions: published blocks that were taken for something else.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = collections.deque(range(NULL_BLOCK + 1, num_blocks))
        self._holders = [0] * num_blocks
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        self._unheld: collections.OrderedDict[int, None] = collections.OrderedDict()  # published; oldest first
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._unheld)

    def allocate(self) -> int | None:
        """Returns a block for one holder, evicting the least recently used if none is free; None if all are held."""
        if self._free:
            block = self._free.popleft()
        elif self._unheld:
            block, _ = self._unheld.popitem(last=False)
            del self._block_of_key[self._key_of_block.pop(block)]
            self.num_evictions += 1
        else:
            return None
        self._holders[block] = 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Makes a held block findable. If another block has the key already, that one stays."""
        if key not in self._block_of_key:
            self._block_of_key[key] = block
            self._key_of_block[block] = key

    def share(self, keys: Sequence[bytes]) -> tuple[int, int] | None:
        """Finds the longest published prefix, and holds its last block: the state there is all that is needed.

        Args:
          keys: keys of the blocks of a request, from its first on.

        Returns:
          The column and the block, or None where nothing is published.
        """
        for column in range(len(keys) - 1, -1, -1):
            block = self._block_of_key.get(keys[column])
            if block is not None:
                self._unheld.pop(block, None)
                self._holders[block] += 1
                return column, block
        return None

    def release(self, block: int) -> None:
        """Gives up one hold. A block without holders becomes evictable if it is published, else free."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._key_of_block:
                self._unheld[block] = None
            else:
                self._free.append(block)
