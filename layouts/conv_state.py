"""The two memory layouts of a paged conv state."""

import enum
from typing import Any


class ConvStateLayout(enum.Enum):
    """Order of the two inner axes of a conv state pool.

    Dims: N = num_blocks, D = dim (channels), L = state_len (tokens).

    * ``DS``: ``[N, D, L]``. Tensor parallelism slices axis 1; the last tokens of a block are strided.
    * ``SD``: ``[N, L, D]``. The last tokens of a block are contiguous.

    The members play the role of vLLM's ``CONV_STATE_DIM_FIRST`` constexpr.
    """

    DS = "DS"
    SD = "SD"

    @classmethod
    def parse(cls, conv_layout: "ConvStateLayout | str") -> "ConvStateLayout":
        """Returns the member that `conv_layout` names.

        Raises:
          ValueError: `conv_layout` is neither a member nor the name of one.
        """
        try:
            return cls(conv_layout)
        except ValueError:
            raise ValueError(f"conv_layout must be 'DS' or 'SD', got {conv_layout!r}") from None

    @property
    def axes(self) -> tuple[str, str, str]:
        """Names of the axes of an unstacked pool."""
        return ("num_blocks", "dim", "state_len") if self is ConvStateLayout.DS else ("num_blocks", "state_len", "dim")

    @property
    def dim_axis(self) -> int:
        """Axis of the channels in an unstacked pool, the one that tensor parallelism slices."""
        return self.axes.index("dim")

    @property
    def token_axis(self) -> int:
        """Axis of the tokens in an unstacked pool, the one that a copy shifts along."""
        return self.axes.index("state_len")

    def shape(self, num_blocks: int, dim: int, state_len: int) -> tuple[int, int, int]:
        """Returns the shape of an unstacked pool."""
        return (num_blocks, dim, state_len) if self is ConvStateLayout.DS else (num_blocks, state_len, dim)

    def dims(self, pool_shape: tuple[int, ...]) -> dict[str, Any]:
        """Returns the last three axes of `pool_shape` by name."""
        return dict(zip(self.axes, pool_shape[-3:], strict=True))
