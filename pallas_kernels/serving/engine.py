"""Continuous batching over paged Mamba state: the host's half of a step.

A request's column i is the i-th entry of its row of the block table. A boundary is a multiple of the block size; the
state at the end of column i's tokens is saved in its block, for others to start from. Until then the running column,
that of the last scheduled token, and the columns behind it hold checkpoints: the states after each token of the
window. The counter, `num_accepted_tokens`, says which of them is the true one. README, "What it does, exactly", has the
rules of both copies.

One step, from request to block. Say blocks hold 8 tokens, `num_spec` is 3, and a request of 20 prompt tokens whose
first 16 were served before comes to the engine:

1. `submit` queues it. `step` finds a free row for it (`_admit`): its keys, a hash chain over its complete blocks, tell
   that the state after 16 tokens is published. The request shares that block as its column 1, and starts with 16
   computed tokens; column 0 stays null, because a Mamba state needs only the last one.
2. `_schedule` takes the known tokens up to the next boundary, here the 4 that are left. As these are all it knows, the
   drafter adds guesses, say 3: tokens 16 to 22 are scheduled. The last one lies in column 2, which so is the running
   column. Token 19 and the drafts form the window, tokens 16 to 18 are prefilled before it. The columns that may be
   written get blocks: column 2 for the state after token 19, and columns 3, 4 and 5 for the states after each draft.
3. `serve_step` (in `step.py`) runs on the device, in one jitted call: `preprocess_mamba` copies the state of column 1
   into column 2; the model runs, and leaves its checkpoints in columns 2 to 5; verification accepts, say, all 3 drafts
   and a fourth token of the model's own; the state now is the one in column 5, at conv offset 3.
   `postprocess_mamba` sees that 23 tokens reach no boundary, and leaves it there: the counter stays 4, and the next
   step reads from there.
4. Only now does the host look at what was accepted (`_advance`): 4 tokens go to the request, 23 are computed. A block
   whose boundary was reached is published under its key. Columns before the running one are released.
5. In the next step one token is known, token 23, and 3 more are guessed: token 26 is the last one, so that column 3 is
   the running column now. `preprocess_mamba` moves the state there, from column 5 and conv offset 3. Say 2 drafts are
   right: 26 tokens are computed, and the state after 24 of them, the first checkpoint, is the boundary's.
   `postprocess_mamba` copies it from column 3 to column 2, which is published. The true state stays in column 5, two
   checkpoints further, and the counter stays 3.

When no block is free, the published one that nobody used for longest is evicted. When there is none, the request that
was submitted last gives way (`preempt`), be it the one that asks. It queues again with the tokens it has, and its state
is computed again, from the last of its blocks that is still published.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layouts import ConvStateLayout, MambaState, partition_specs, row_steps
from pallas_kernels.serving.blocks import NULL_BLOCK, BlockPool, block_keys
from pallas_kernels.serving.copies import TENSOR_AXIS
from pallas_kernels.serving.drafters import Drafter, NgramDrafter
from pallas_kernels.serving.model import LanguageModel
from pallas_kernels.serving.step import Slots, StepConfig, StepPlan, serve_step


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and what was generated for it so far.

    Attributes:
      request_id: its place in the order of submission.
      tokens: prompt and output.
      num_prompt: how many of them are the prompt.
      max_tokens: how many there may be in the end.
      num_computed: tokens whose state is computed.
      columns: the blocks it holds, by column.
      keys: keys of its complete blocks.
      num_cached: tokens it took from the prefix cache when it first came.
      row: its row of the batch, -1 while it waits.
      fresh: whether it has not run since it got its row.
    """

    request_id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    num_computed: int = 0
    columns: dict[int, int] = dataclasses.field(default_factory=dict)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    num_cached: int | None = None
    row: int = -1
    fresh: bool = True

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt :]

    @property
    def is_finished(self) -> bool:
        """Whether all tokens are there."""
        return len(self.tokens) >= self.max_tokens


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What a request computes in a step: known tokens, then drafts. `reaches_end`: those are all its known tokens."""

    request: Request
    known: list[int]
    drafts: list[int]
    reaches_end: bool


class Step(NamedTuple):
    """A step that was run: where the states were before it, what was planned, and what was accepted."""

    slots: Slots
    plan: StepPlan
    num_accepted: np.ndarray


@dataclasses.dataclass
class Stats:
    """Counts over the life of an engine.

    Attributes:
      num_steps: steps.
      num_windows: windows that yielded tokens.
      num_output: tokens that they yielded.
      num_prompt: prompt tokens of admitted requests, preempted ones counted once.
      num_cached: those among them that came from the prefix cache.
      num_preemptions: requests that had to go back to the queue.
    """

    num_steps: int = 0
    num_windows: int = 0
    num_output: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_preemptions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return self.num_cached / max(self.num_prompt, 1)

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens that a window yields: 1 without speculation."""
        return self.num_output / max(self.num_windows, 1)


class Engine:
    """Serves requests with greedy sampling, in a batch of a fixed number of rows.

    Attributes:
      model: the model.
      weights: its weights.
      config: constants of its steps.
      states: the pools, one `MambaState` per layer.
      slots: where each row's state is, after the last step.
      stats: counts.
      last_step: what the last step was given and what it accepted, for measurements.
    """

    def __init__(
        self,
        model: LanguageModel,
        weights: Any,
        config: StepConfig,
        *,
        batch: int,
        num_blocks: int,
        max_tokens: int,
        prefill_tokens: int = 256,
        prefix_cache: bool = True,
        drafter: Drafter | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        """Builds an engine with empty pools.

        Args:
          model: the model.
          weights: its weights.
          config: block size, drafts per step, layout, copies.
          batch: rows.
          num_blocks: blocks of each pool, the null block included.
          max_tokens: tokens that a request may have, prompt and output.
          prefill_tokens: most known tokens that a row computes before its window in a step.
          prefix_cache: whether finished blocks are published and found.
          drafter: who guesses; prompt lookup by default.
          mesh: a mesh with the axis `TENSOR_AXIS` to spread weights and pools over; the copies must know it too.

        Raises:
          ValueError: the pools are too small for a single request.
        """
        self.model, self.weights, self.config = model, weights, config
        # A request holds the columns from the one before its first scheduled token to its last draft's checkpoint.
        self._blocks_per_request = 2 + -(-config.num_spec // config.block_size) + config.num_spec
        if num_blocks <= self._blocks_per_request:
            raise ValueError(f"num_blocks must be more than {self._blocks_per_request}, got {num_blocks}")
        self._max_tokens = max_tokens
        self._num_columns = -(-max_tokens // config.block_size) + config.num_spec
        self._prefill_tokens = min(prefill_tokens, config.block_size - 1)
        self._prefix_cache = prefix_cache
        self._drafter = drafter or NgramDrafter()
        self._pool = BlockPool(num_blocks)
        self._rows: list[Request | None] = [None] * batch
        self._waiting: collections.deque[Request] = collections.deque()
        self._num_submitted = 0
        self.stats = Stats()
        self.slots = Slots(jnp.full(batch, -1, jnp.int32), jnp.ones(batch, jnp.int32))
        self.states = _empty_pools(model, config, num_blocks)
        self.last_step: Step | None = None
        if mesh is not None:
            self.weights = model.shard(weights, mesh, TENSOR_AXIS)
            self.slots = jax.device_put(self.slots, NamedSharding(mesh, PartitionSpec()))
            specs = partition_specs(self.states, conv_layout=config.conv_layout, tensor_axis=TENSOR_AXIS)
            self.states = jax.tree.map(lambda pool, spec: _place(pool, mesh, spec), self.states, specs)

    @property
    def running(self) -> list[Request]:
        """Requests that have a row, oldest first."""
        return sorted((request for request in self._rows if request), key=lambda request: request.request_id)

    @property
    def is_idle(self) -> bool:
        """Whether every request is finished."""
        return not self._waiting and not self.running

    @property
    def num_available_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_available

    @property
    def num_evictions(self) -> int:
        """Published blocks that were taken for something else."""
        return self._pool.num_evictions

    def submit(self, prompt: Sequence[int], num_output: int) -> Request:
        """Queues a request, and returns it: its `output` grows with the steps.

        Raises:
          ValueError: the prompt is empty, nothing is to be generated, or both are more than `max_tokens`.
        """
        if not prompt or num_output < 1 or len(prompt) + num_output > self._max_tokens:
            raise ValueError(
                f"a request needs a prompt, num_output >= 1, and at most {self._max_tokens} tokens in all; "
                f"got {len(prompt)} and {num_output}"
            )
        request = Request(self._num_submitted, list(prompt), len(prompt), len(prompt) + num_output)
        self._num_submitted += 1
        self._waiting.append(request)
        return request

    def run(self) -> None:
        """Steps until every request is finished."""
        while not self.is_idle:
            self.step()

    def step(self) -> int:
        """Runs one step, and returns how many tokens it generated."""
        self._admit()
        chunks = self._schedule()
        if not chunks:
            return 0
        slots, plan = self.slots, self._plan(chunks)
        self.states, self.slots, sampled, num_accepted = serve_step(
            self.weights, self.states, slots, plan, model=self.model, config=self.config
        )
        # The state is right now, in the order of the device. What follows is bookkeeping.
        sampled, num_accepted = jax.device_get((sampled, num_accepted))
        self.last_step = Step(slots, plan, num_accepted)
        return self._advance(chunks, self.last_step, sampled)

    def preempt(self, request: Request) -> None:
        """Takes a running request off its row: it queues again, first in line, with the tokens it has.

        Raises:
          ValueError: it is not running.
        """
        if request.row < 0 or self._rows[request.row] is not request:
            raise ValueError(f"request {request.request_id} is not running here")
        self._leave(request)
        self._waiting.appendleft(request)
        self.stats.num_preemptions += 1

    def _admit(self) -> None:
        """Gives free rows to waiting requests, as long as there are blocks for one more."""
        room = self._pool.num_available // self._blocks_per_request
        for row, occupant in enumerate(self._rows):
            if not self._waiting or not room:
                return
            if occupant is None:
                room -= 1
                request = self._rows[row] = self._waiting.popleft()
                request.row, request.fresh = row, True
                self._find_prefix(request)

    def _find_prefix(self, request: Request) -> None:
        """Starts a request from the longest published prefix that leaves it a token to compute."""
        block_size = self.config.block_size
        request.num_computed = 0
        if self._prefix_cache:
            request.keys = block_keys(request.tokens, block_size, request.keys)
            if found := self._pool.share(request.keys[: (len(request.tokens) - 1) // block_size]):
                column, block = found
                request.columns[column] = block
                request.num_computed = (column + 1) * block_size
        if request.num_cached is None:
            request.num_cached = request.num_computed
            self.stats.num_prompt += request.num_prompt
            self.stats.num_cached += request.num_cached

    def _schedule(self) -> list[Chunk]:
        """Decides what each request computes, the oldest first, and gets the blocks that it will write."""
        chunks = []
        for request in self.running:
            # It may have lost its row to an older one in this very loop.
            if request.row >= 0:
                chunk = self._next_chunk(request)
                if self._get_blocks(chunk):
                    chunks.append(chunk)
        return chunks

    def _next_chunk(self, request: Request) -> Chunk:
        """Known tokens up to the next boundary, so that no block that could be published is missed; then drafts."""
        start = request.num_computed
        to_boundary = self.config.block_size - start % self.config.block_size
        known = request.tokens[start : start + min(to_boundary, self._prefill_tokens + 1)]
        reaches_end = start + len(known) == len(request.tokens)
        # The last token comes from the model in any case.
        limit = min(self.config.num_spec, request.max_tokens - len(request.tokens) - 1)
        drafts = self._drafter.draft(request.request_id, request.tokens, limit) if reaches_end and limit else []
        return Chunk(request, known, drafts, reaches_end)

    def _get_blocks(self, chunk: Chunk) -> bool:
        """Gets a block for every column that the step may write; False if the request itself had to give way."""
        request, num_drafts, block_size = chunk.request, len(chunk.drafts), self.config.block_size
        # The running column may be the next one; postprocess may save a boundary in that of the last known token.
        last_known = request.num_computed + len(chunk.known) - 1
        first, last = last_known // block_size, (last_known + num_drafts) // block_size + num_drafts
        for column in range(first, last + 1):
            while column not in request.columns:
                block = self._pool.allocate()
                if block is not None:
                    request.columns[column] = block
                    continue
                youngest = self.running[-1]
                self.preempt(youngest)
                if youngest is request:
                    return False
        return True

    def _plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Writes the step down as arrays."""
        batch = len(self._rows)
        width = self._prefill_tokens if any(len(chunk.known) > 1 for chunk in chunks) else 0
        plan = StepPlan(
            block_tables=np.full((batch, self._num_columns), NULL_BLOCK, np.int32),
            fresh=np.ones(batch, bool),
            num_computed=np.zeros(batch, np.int32),
            prefill=np.zeros((batch, width), np.int32),
            num_prefill=np.zeros(batch, np.int32),
            window=np.zeros((batch, 1 + self.config.num_spec), np.int32),
            num_window=np.zeros(batch, np.int32),
            num_draft=np.zeros(batch, np.int32),
        )
        for chunk in chunks:
            request, (*before, last) = chunk.request, chunk.known
            row = request.row
            plan.block_tables[row, list(request.columns)] = list(request.columns.values())
            plan.fresh[row] = request.fresh
            plan.num_computed[row] = request.num_computed
            plan.prefill[row, : len(before)] = before
            plan.num_prefill[row] = len(before)
            plan.window[row, : 1 + len(chunk.drafts)] = [last, *chunk.drafts]
            plan.num_window[row] = 1 + len(chunk.drafts)
            plan.num_draft[row] = len(chunk.drafts)
        return plan

    def _advance(self, chunks: Sequence[Chunk], step: Step, sampled: np.ndarray) -> int:
        """Appends tokens, publishes blocks, releases what is not needed any more; returns the number of tokens."""
        block_size, num_output = self.config.block_size, 0
        inputs = step.plan.postprocess_inputs(step.num_accepted, block_size)
        # What the device decided, decided on the host again.
        decisions = list(row_steps(inputs, batch=len(self._rows), block_size=block_size))
        for chunk in chunks:
            request, decision = chunk.request, decisions[chunk.request.row]
            accepted = int(step.num_accepted[request.row])
            request.fresh = False
            request.num_computed += len(chunk.known) + accepted - 1
            if chunk.reaches_end:
                request.tokens += sampled[request.row, :accepted].tolist()
                num_output += accepted
                self.stats.num_windows += 1
            # Even if the state was in its place already, and nothing was copied.
            if self._prefix_cache and decision.crosses:
                request.keys = block_keys(request.tokens, block_size, request.keys)
                self._pool.publish(request.columns[decision.dst_col], request.keys[decision.dst_col])
            if request.is_finished:
                self._leave(request)
            else:
                self._release(request, [column for column in request.columns if column < decision.mamba_state_idx])
        self.stats.num_steps += 1
        self.stats.num_output += num_output
        return num_output

    def _leave(self, request: Request) -> None:
        """Takes a request off its row and releases its blocks."""
        self._rows[request.row] = None
        request.row = -1
        self._release(request, list(request.columns))

    def _release(self, request: Request, columns: Sequence[int]) -> None:
        """Gives up the blocks of some columns."""
        for column in columns:
            self._pool.release(request.columns.pop(column))


def _empty_pools(model: LanguageModel, config: StepConfig, num_blocks: int) -> list[MambaState]:
    """Pools of zeros, one `MambaState` per layer."""
    shapes = model.state_shapes(ConvStateLayout.parse(config.conv_layout), config.num_spec)

    def pool(block: Any) -> jax.Array:
        return jnp.zeros((num_blocks, *block.shape), block.dtype)

    return [MambaState(conv=pool(shapes.conv), temporal=pool(shapes.temporal)) for _ in range(model.num_layers)]


def _place(pool: jax.Array, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> jax.Array:
    """Spreads a pool as a step returns it, with no None at the end of its spec: the next step then compiles no more."""
    axes = list(spec)
    while axes and axes[-1] is None:
        axes.pop()
    return jax.device_put(pool, NamedSharding(mesh, PartitionSpec(*axes)))
