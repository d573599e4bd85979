"""Tuning knobs of the Mosaic GPU kernel."""

import dataclasses

# What a kernel traced without a GPU at hand is sized for: the SM count of an H100 or H200.
DEFAULT_NUM_SMS = 132
# The largest stage: one of these and the request vectors fit a thread block's shared memory.
MAX_STAGE_BYTES = 96 * 1024
# Limits of a launch: more thread blocks than any device holds, and the warpgroups of one block.
_MAX_CTAS = 2**16
_MAX_WARPGROUPS = 8
# Warpgroups of an SM that copy at once. As two thread blocks they start sooner than as one.
_CTAS_PER_SM, _WARPGROUPS_PER_CTA = 2, 4
# Bytes on their way to shared memory, over the whole device, at which a copy is fastest: fewer leave
# the memory idle, and with more it is slower too (H200; `python -m pallas_kernels.bench` with
# --tile-bytes shows it).
_BYTES_IN_FLIGHT = 4 * 2**20
_LEAST_TILE_BYTES, _MOST_TILE_BYTES = 4096, 16384


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How the Mosaic GPU kernel spreads its work over the device. Results never depend on it.

    Attributes:
      num_ctas: thread blocks of the persistent grid; None takes two for each SM of the device, and two
        in the interpreter. A small number leaves SMs to kernels that run beside this one.
      num_warpgroups: warpgroups of a thread block, each of which copies tiles of its own; None takes 4,
        or 8 with a given `num_ctas`, or two in the interpreter. Large stages leave room for fewer.
      tile_bytes: bytes that a warpgroup brings in at once, about: of temporal state, and up to a quarter
        more of an SD window; a multiple of 2048. None takes what keeps the whole device at its best number
        of bytes in flight.
      stage_bytes: bytes of shared memory that a tile of a conv window passes through, about; a
        multiple of 2048.
    """

    num_ctas: int | None = None
    num_warpgroups: int | None = None
    tile_bytes: int | None = None
    stage_bytes: int = 8192

    def resolved(self, num_sms: int, *, interpreted: bool) -> "KernelConfig":
        """Fills in what is None, for a device of `num_sms` SMs."""
        if interpreted:  # It simulates warpgroups one after the other.
            num_ctas, num_warpgroups = 2, 2
        elif self.num_ctas is None:
            num_ctas, num_warpgroups = _CTAS_PER_SM * num_sms, _WARPGROUPS_PER_CTA
        else:
            num_ctas, num_warpgroups = self.num_ctas, _MAX_WARPGROUPS
        num_ctas = self.num_ctas or num_ctas
        num_warpgroups = self.num_warpgroups or num_warpgroups
        share = max(_BYTES_IN_FLIGHT // (num_ctas * num_warpgroups), _LEAST_TILE_BYTES)
        tile_bytes = self.tile_bytes or min(1 << (share.bit_length() - 1), _MOST_TILE_BYTES)
        return dataclasses.replace(self, num_ctas=num_ctas, num_warpgroups=num_warpgroups, tile_bytes=tile_bytes)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
          ValueError: one of them is no int, or out of range.
        """
        for name, most in (("num_ctas", _MAX_CTAS), ("num_warpgroups", _MAX_WARPGROUPS)):
            value = getattr(self, name)
            if value is not None and not _is_int_in(value, 1, most):
                raise ValueError(f"KernelConfig.{name} must be None or an int in 1..{most}, got {value!r}")
        for name, or_none in (("tile_bytes", "None or "), ("stage_bytes", "")):
            value = getattr(self, name)
            if or_none and value is None:
                continue
            if not _is_int_in(value, 2048, MAX_STAGE_BYTES) or value % 2048:
                raise ValueError(
                    f"KernelConfig.{name} must be {or_none}a multiple of 2048 in 2048..{MAX_STAGE_BYTES}, got {value!r}"
                )


def _is_int_in(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
