"""vLLM's own Triton kernels as a contender, taken from a copy of vLLM that the caller has.

Of its file only the functions under `@triton.jit` and the plain constants beside them are run, so neither vLLM nor what
it imports has to be installed. The kernels write to the very pools that the JAX contenders use, through DLPack.
"""

import ast
import builtins
import dataclasses
import hashlib
import importlib
import linecache
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from layouts import ConvStateLayout, MambaState
from pallas_kernels.bench.timing import Untraced
from pallas_kernels.bench.workload import BLOCK_SIZE, Workload

MODULE = "vllm/v1/worker/mamba_utils.py"
POSTPROCESS = "postprocess_mamba_fused_kernel"
PREPROCESS = "preprocess_mamba_align_fused_kernel"
PRECOPY = "precopy_mamba_align_fused_kernel"
# What vLLM's host code gives its kernels; the number of tiles is a constant of the file.
_COPY_BLOCK_SIZE = 1024
_PREPROCESS_BLOCK_SIZE = 256
_TILES = "_TEMPORAL_TILES"
_WANTED_RELEASE = "vLLM 0.33 has it"


class VllmUnavailableError(RuntimeError):
    """vLLM's kernels cannot be used here; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class VllmKernels:
    """What was loaded.

    Attributes:
      functions: the `@triton.jit` functions of the file, by name.
      num_tiles: tiles into which a launch divides a temporal block.
      source: where they came from.
      version: vLLM's version; of a lone file, which cannot tell, its digest.
      torch: the module.
    """

    functions: dict[str, Any]
    num_tiles: int
    source: str
    version: str
    torch: ModuleType

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that they cover. No kernel copies between blocks that are named one by one."""
        return ("post", "pre") if {PREPROCESS, PRECOPY} <= self.functions.keys() else ("post",)


class Launch(Untraced):
    """A launch of Triton kernels, whose result `jax.block_until_ready` can wait for."""

    def __init__(self, launch: Callable[[], None], wait: Callable[[], None], kept: Any) -> None:
        """Keeps `kept` alive, of which the kernels know no more than the addresses."""
        super().__init__(launch)
        self._wait, self._kept = wait, kept

    def __call__(self, *args: Any, **kwargs: Any) -> "Launch":
        """Launches; the result is this object, whose readiness is that of the device."""
        super().__call__()
        return self

    def block_until_ready(self) -> "Launch":
        """Waits for all launches."""
        self._wait()
        return self


def load_kernels(path: str | Path) -> VllmKernels:
    """Loads the kernels.

    Args:
      path: an installed package's folder, a wheel, or the one file `vllm/v1/worker/mamba_utils.py`.

    Returns:
      The kernels.

    Raises:
      VllmUnavailableError: the file, one of its kernels, Triton or torch is missing.
    """
    name, source, version = _read(Path(path))
    nodes = ast.parse(source, filename=name).body
    kernels = [node for node in nodes if isinstance(node, ast.FunctionDef) and _is_triton_jit(node)]
    if POSTPROCESS not in {node.name for node in kernels}:
        raise VllmUnavailableError(f"{name} has no @triton.jit function {POSTPROCESS}; {_WANTED_RELEASE}")
    constants = _constants(nodes)
    if _TILES not in constants:
        raise VllmUnavailableError(f"{name} does not set {_TILES}, the tiles of its launches; {_WANTED_RELEASE}")
    if foreign := _foreign_names(kernels, {*constants, "triton", "tl"}):
        raise VllmUnavailableError(
            f"the kernels of {name} use {', '.join(foreign)} from other files of vLLM, which are not read; "
            "vLLM 0.33 keeps them in one"
        )
    triton, torch = (_import(package) for package in ("triton", "torch"))
    namespace = constants | {"triton": triton, "tl": _import("triton.language"), "__name__": name}
    # Triton reads a kernel's source through `inspect`, which asks `linecache`.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(ast.Module(body=list(kernels), type_ignores=[]), name, "exec"), namespace)
    functions = {node.name: namespace[node.name] for node in kernels}
    return VllmKernels(functions, constants[_TILES], name, version, torch)


def _read(path: Path) -> tuple[str, str, str]:
    """Returns the name, text and version of the file."""
    if path.is_dir():
        for candidate in (path / MODULE, path / MODULE.removeprefix("vllm/")):
            if candidate.is_file():
                info = next(iter(candidate.parents[3].glob("vllm-*.dist-info")), None)
                return str(candidate), candidate.read_text(), _version(info.name if info else "")
        raise VllmUnavailableError(f"the folder {path} has no {MODULE}: it is no vLLM package")
    if not path.is_file():
        raise VllmUnavailableError(f"{path} does not exist: --vllm wants vLLM's package folder, wheel or {MODULE}")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            if MODULE not in wheel.namelist():
                raise VllmUnavailableError(f"the wheel {path} has no {MODULE}")
            return f"{path}/{MODULE}", wheel.read(MODULE).decode(), _version(path.name)
    source = path.read_text()
    return str(path), source, f"of a file with SHA-256 {hashlib.sha256(source.encode()).hexdigest()[:12]}"


def _version(name: str) -> str:
    """The version in the name of a wheel or a dist-info folder."""
    found = re.match(r"vllm-([^-]+?)(\.dist-info|-)", name)
    return found[1] if found else "unknown"


def _import(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise VllmUnavailableError(f"vLLM's kernels need {package}, which does not import here: {error}") from error


def _is_triton_jit(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).split("(")[0] == "triton.jit" for decorator in node.decorator_list)


def _constants(nodes: list[ast.stmt]) -> dict[str, Any]:
    """The module's names for numbers, strings and other literals."""
    constants = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # Computed, so nothing that a kernel can read.
    return constants


def _foreign_names(kernels: list[ast.FunctionDef], provided: set[str]) -> list[str]:
    """The names that kernels read and that neither they, the file's other kernels nor Python define."""
    known = provided | vars(builtins).keys() | {kernel.name for kernel in kernels}
    foreign = set()
    for kernel in kernels:
        names = [node for node in ast.walk(kernel) if isinstance(node, ast.Name)]
        local = {argument.arg for argument in ast.walk(kernel.args) if isinstance(argument, ast.arg)}
        local |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        foreign |= {node.id for node in names} - local - known
    return sorted(foreign)


class VllmPools:
    """The pools as vLLM's kernels see them: one entry per pool in arrays of addresses, strides and sizes."""

    def __init__(self, kernels: VllmKernels, states: list[MambaState], layout: str) -> None:
        """Describes `states`, arrays that are written to although JAX thinks of them as constant."""
        self.kernels, self.layout = kernels, ConvStateLayout(layout)
        torch = kernels.torch
        pools = [
            (torch.from_dlpack(jax.block_until_ready(pool)), is_conv)
            for state in states
            for pool, is_conv in ((state.conv, True), (state.temporal, False))
            if pool is not None
        ]
        self.tensors = [tensor for tensor, _ in pools]
        self.device = self.tensors[0].device
        token_axis = self.layout.token_axis
        dim_first = self.layout is ConvStateLayout.DS

        def described(values: list[int], dtype: type) -> Any:
            return torch.from_numpy(np.array(values, dtype)).to(self.device)

        def inner_size(tensor: Any, is_conv: bool) -> int:
            """Elements of a token in SD, of a temporal block; a DS window is walked by rows."""
            return (1 if dim_first else tensor.stride(token_axis)) if is_conv else tensor[0].numel()

        rows = [(t.shape[1], t.stride(1) * t.element_size()) if c and dim_first else (0, 0) for t, c in pools]
        self.metadata = {
            "state_base_addrs_ptr": described([t.data_ptr() for t, _ in pools], np.int64),
            "state_block_strides_ptr": described([t.stride(0) * t.element_size() for t, _ in pools], np.int64),
            "state_elem_sizes_ptr": described([t.element_size() for t, _ in pools], np.int32),
            "state_inner_sizes_ptr": described([inner_size(t, c) for t, c in pools], np.int64),
            "state_conv_widths_ptr": described([t.shape[token_axis] if c else 0 for t, c in pools], np.int32),
            "state_group_indices_ptr": described([0] * len(pools), np.int32),
            "state_dim_row_count_ptr": described([count for count, _ in rows], np.int32),
            "state_dim_row_stride_ptr": described([stride for _, stride in rows], np.int64),
        }

    def step(self, workload: Workload) -> Launch:
        """Returns the step of `workload` on these pools, ready to be repeated."""
        torch, functions = self.kernels.torch, self.kernels.functions
        inputs, table = jax.tree.map(lambda x: torch.from_numpy(np.array(x)).to(self.device), workload.arguments())
        grid = (workload.num_reqs, len(self.tensors), self.kernels.num_tiles)
        shared = self.metadata | {
            "block_table_ptrs_ptr": torch.tensor([table.data_ptr()], dtype=torch.int64, device=self.device),
            "block_table_stride_req": table.stride(0),
            "num_reqs": workload.num_reqs,
            "COPY_BLOCK_SIZE": _COPY_BLOCK_SIZE,
            "CONV_STATE_DIM_FIRST": self.layout is ConvStateLayout.DS,
            "TEMPORAL_TILES": self.kernels.num_tiles,
        }
        # vLLM's kernel must not change the counters that its other thread blocks still read.
        counters = inputs.num_accepted_tokens.clone()

        def post() -> None:
            functions[POSTPROCESS][grid](
                num_accepted_tokens_ptr=inputs.num_accepted_tokens,
                mamba_state_idx_ptr=inputs.mamba_state_idx,
                num_scheduled_tokens_ptr=inputs.num_scheduled_tokens,
                num_computed_tokens_ptr=inputs.num_computed_tokens,
                num_draft_tokens_ptr=inputs.num_draft_tokens,
                num_accepted_tokens_out_ptr=counters,
                idx_mapping_ptr=None,
                block_size=BLOCK_SIZE,
                **shared,
            )

        rows = torch.arange(workload.num_reqs, dtype=torch.int32, device=self.device)
        columns, offsets, index = (torch.empty_like(rows) for _ in range(3))
        decide_grid = (-(-workload.num_reqs // _PREPROCESS_BLOCK_SIZE),)

        def pre() -> None:
            # Both are overwritten. Device-to-device copies are no kernels, and are not timed.
            index.copy_(inputs.mamba_state_idx)
            counters.copy_(inputs.num_accepted_tokens)
            functions[PREPROCESS][decide_grid](
                idx_mapping_ptr=rows,
                state_idx_ptr=index,
                num_computed_tokens_ptr=inputs.num_computed_tokens,
                query_start_loc_ptr=inputs.query_start_loc,
                num_accepted_tokens_ptr=counters,
                src_col_ptr=columns,
                src_off_ptr=offsets,
                num_reqs=workload.num_reqs,
                BLOCK_SIZE=_PREPROCESS_BLOCK_SIZE,
                MAMBA_BLOCK_SIZE=BLOCK_SIZE,
            )
            functions[PRECOPY][grid](
                mamba_state_idx_ptr=index,
                src_col_ptr=columns,
                token_bias_ptr=offsets,
                idx_mapping_ptr=rows,
                **shared,
            )

        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        return Launch(post if workload.operation == "post" else pre, wait, (self.tensors, table))
