"""Tuning knobs of the Mosaic GPU kernel."""

import dataclasses

# What a kernel traced without a GPU at hand is sized for: the SM count of an H100 or H200.
DEFAULT_NUM_SMS = 132
# A stage of this size, twice, fits an SM's shared memory.
MAX_STAGE_BYTES = 96 * 1024
# More thread blocks than any device holds; work item numbers stay far from the end of int32.
_MAX_CTAS = 2**16
# The interpreter simulates thread blocks one after the other.
INTERPRETED_NUM_CTAS = 4


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How the Mosaic GPU kernel spreads its work over the device. Results never depend on it.

    Attributes:
      num_ctas: thread blocks of the persistent grid; None takes `ctas_per_sm` for each SM of the
        device, and a handful in the interpreter. A small number leaves SMs to kernels that run
        beside this one.
      ctas_per_sm: thread blocks per SM when `num_ctas` is None.
      stage_bytes: bytes of shared memory that a tile passes through, a multiple of 2048. Each thread
        block has one such stage: loads and stores overlap across the thread blocks of an SM.
    """

    num_ctas: int | None = None
    ctas_per_sm: int = 4
    stage_bytes: int = 16384

    def grid_size(self, num_sms: int, *, interpreted: bool) -> int:
        """Thread blocks to launch on a device of `num_sms` SMs."""
        return self.num_ctas or (INTERPRETED_NUM_CTAS if interpreted else self.ctas_per_sm * num_sms)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
          ValueError: one of them is no int, or out of range.
        """
        if self.num_ctas is not None and not _is_int_in(self.num_ctas, 1, _MAX_CTAS):
            raise ValueError(f"KernelConfig.num_ctas must be None or an int in 1..{_MAX_CTAS}, got {self.num_ctas!r}")
        if not _is_int_in(self.ctas_per_sm, 1, 16):
            raise ValueError(f"KernelConfig.ctas_per_sm must be an int in 1..16, got {self.ctas_per_sm!r}")
        if not _is_int_in(self.stage_bytes, 2048, MAX_STAGE_BYTES) or self.stage_bytes % 2048:
            raise ValueError(
                f"KernelConfig.stage_bytes must be a multiple of 2048 in 2048..{MAX_STAGE_BYTES}, "
                f"got {self.stage_bytes!r}"
            )


def _is_int_in(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
