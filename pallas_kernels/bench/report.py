"""What a run says: a table that grows row by row, progress, and a record for a file."""

import dataclasses
import datetime
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.bench.timing import method

_HEADER = (
    f"{'model':>28} {'layout':>6} {'op':>4} {'tp':>3} {'offset':>6} {'reqs':>5} {'copying':>7} {'contender':>12} "
    f"{'time us':>12} {'GB/s':>6} {'of limit':>8} {'vs vllm':>8} {'kernels':>7}"
)


class Reporter:
    """Prints rows as they come, and progress on a terminal."""

    def __init__(self, total: int | None = None) -> None:
        self._done, self._total, self._titled, self._live = 0, total, False, sys.stderr.isatty()

    def progress(self, what: str) -> None:
        """Says on the terminal what is being done."""
        if self._live:
            of = f"/{self._total}" if self._total else ""
            print(f"\r\x1b[K[{self._done}{of}] {what}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the progress line away."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Prints a line between the rows."""
        self.clear()
        print(line, flush=True)

    def row(self, row: Any, rows: Sequence[Any]) -> None:
        """Prints a measurement beside the earlier ones of the same workload in `rows`."""
        self._done += 1
        if not self._titled:
            self.say(_HEADER)
            self._titled = True
        limit, vllm = (same_workload(rows, row, contender) for contender in ("limit", "vllm"))
        share = f"{limit.seconds / row.seconds:.1%}" if limit and row.copying else "-"
        ratio = f"{vllm.seconds / row.seconds:.2f}x" if vllm else "-"
        contender = f"{row.contender}/{row.num_ctas}" if row.num_ctas else row.contender
        self.say(
            f"{row.model:>28} {row.layout:>6} {row.operation:>4} {row.tp:>3} {row.offset:>6} {row.num_reqs:>5} "
            f"{row.copying:>7} {contender:>12} {row.seconds * 1e6:>12.2f} {row.bytes / row.seconds / 1e9:>6.0f} "
            f"{share:>8} {ratio:>8} {row.kernels:>7}"
        )


def workload_key(row: Any) -> tuple[Any, ...]:
    """What two rows have in common when the same workload was measured."""
    return (row.model, row.layout, row.tp, row.operation, row.num_reqs, row.copying, row.offset, row.paired)


def same_workload(rows: Sequence[Any], row: Any, contender: str) -> Any:
    """Returns the row of `contender` on the workload of `row`, None without one."""
    found = (r for r in rows if r.contender == contender and r.num_ctas is None)
    return next((r for r in found if workload_key(r) == workload_key(row)), None)


def environment(vllm_version: str | None = None) -> dict[str, Any]:
    """Returns where this run takes place: card, driver, versions, date and how it times."""
    device = jax.devices()[0]
    versions = {name: _version(name) for name in ("jax", "jaxlib", "triton", "torch")}
    return {
        "device": device.device_kind,
        "driver": _driver() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        **versions,
        "vllm": vllm_version,
        "date": str(datetime.date.today()),
        "method": method(),
    }


def headline(where: dict[str, Any]) -> str:
    """One line for people: what the numbers below it were measured on."""
    versions = ", ".join(f"{name} {where[name]}" for name in ("jax", "triton", "torch", "vllm") if where[name])
    driver = f", driver {where['driver']}" if where["driver"] else ""
    return f"{where['device']}{driver}, {versions}, {where['date']}; {where['method']}"


def record(where: dict[str, Any], rows: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Returns everything a run measured, ready for a JSON file."""
    return where | more | {"rows": [dataclasses.asdict(row) for row in rows]}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
