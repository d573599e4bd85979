"""Tuning knobs of the Mosaic GPU kernel."""

import dataclasses

# What a kernel traced without a GPU at hand is sized for: the SM count of an H100 or H200.
DEFAULT_NUM_SMS = 132
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
        if self.num_ctas is not None and self.num_ctas < 1:
            raise ValueError(f"KernelConfig.num_ctas must be positive or None, got {self.num_ctas}")
        if self.ctas_per_sm < 1:
            raise ValueError(f"KernelConfig.ctas_per_sm must be positive, got {self.ctas_per_sm}")
        if self.stage_bytes < 2048 or self.stage_bytes % 2048:
            raise ValueError(f"KernelConfig.stage_bytes must be a positive multiple of 2048, got {self.stage_bytes}")
