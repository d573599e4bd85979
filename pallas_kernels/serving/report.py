"""Measures the serving loop: four modes on one workload, in one run, with the tokens of all of them compared."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from layouts import MambaState, row_steps
from pallas_kernels.bench.timing import Untraced, median_seconds
from pallas_kernels.serving.copies import Copies, SeparateCopies
from pallas_kernels.serving.drafters import Drafter, NgramDrafter, ScriptedDrafter
from pallas_kernels.serving.engine import Engine, Request, Step
from pallas_kernels.serving.model import LanguageModel
from pallas_kernels.serving.reference import Decoded, agrees, decode_plainly
from pallas_kernels.serving.step import Slots, StepConfig, StepPlan, postprocess, preprocess, serve_step


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that share the start of their prompts, as under one system prompt.

    Attributes:
      num_requests: how many.
      shared: tokens that all prompts start with.
      own: tokens that follow, different ones for each.
      output: tokens to generate for each.
      batch: rows of the engine.
      block_size: tokens per block.
      num_spec: drafts per step.
      drafter: "ngram", or "scripted": random weights give a drafter nothing to guess, so the drafts come from plain
        decoding, and are made wrong so that 1, 2, ... 1 + num_spec tokens of a window are accepted in turn.
    """

    num_requests: int
    shared: int
    own: int
    output: int
    batch: int
    block_size: int
    num_spec: int
    drafter: str = "scripted"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The prompts: random, and the same in every run."""
        rng = np.random.default_rng(0)
        shared = rng.integers(0, vocab_size, self.shared).tolist()
        return [shared + rng.integers(0, vocab_size, self.own).tolist() for _ in range(self.num_requests)]

    @property
    def num_blocks(self) -> int:
        """Blocks for a full batch, for the shared prompt, and as many again for what is published besides."""
        # One more than the engine asks for.
        per_request = 3 + self.num_spec + -(-self.num_spec // self.block_size)
        return 1 + 2 * (self.batch * per_request + self.shared // self.block_size)


WORKLOADS = {
    "tiny": Workload(num_requests=8, shared=40, own=5, output=24, batch=4, block_size=8, num_spec=3),
    # Blocks so small that requests cross boundaries while they generate.
    "130m": Workload(num_requests=32, shared=2048, own=32, output=128, batch=16, block_size=64, num_spec=3),
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to serve the workload."""

    name: str
    copies: Copies
    speculates: bool = True
    prefix_cache: bool = True


@dataclasses.dataclass
class Result:
    """What a mode did. Times are in seconds.

    Attributes:
      mode: its name.
      seconds: the whole run.
      tokens_per_second: generated tokens over the whole run.
      decode_tokens_per_second: the same over the steps in which no row had a prompt to compute.
      hit_rate: prompt tokens that came from the prefix cache.
      accepted_length: tokens that a window yielded, on average.
      num_steps: steps.
      copy_costs: of a decoding step of a full batch with the fewest copies, and of one with the most; measured where
        only the copies differ from those of another mode.
    """

    mode: str
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float
    hit_rate: float
    accepted_length: float
    num_steps: int
    copy_costs: list["CopyCost"]


@dataclasses.dataclass(frozen=True)
class CopyCost:
    """What the copies cost in one step: kernel time on a GPU, wall time elsewhere.

    Attributes:
      num_copies: copies of a request's state, before the forward pass and after it.
      copy_seconds: both launches, run alone.
      step_seconds: the whole step.
    """

    num_copies: int
    copy_seconds: float
    step_seconds: float


def make_modes(copies: Copies) -> list[Mode]:
    """The four modes; `copies` are the fused ones."""
    return [
        Mode("fused copies", copies),
        Mode("separate copies", SeparateCopies()),
        Mode("no prefix cache", copies, prefix_cache=False),
        Mode("no speculation", copies, speculates=False),
    ]


def make_engine(
    model: LanguageModel,
    weights: Any,
    mode: Mode,
    workload: Workload,
    want: Sequence[Decoded],
    *,
    conv_layout: str,
    mesh: jax.sharding.Mesh | None,
) -> Engine:
    """An engine for the workload in this mode; `want` is the workload as decoded plainly."""
    num_spec = workload.num_spec if mode.speculates else 0
    drafter: Drafter = NgramDrafter()
    if workload.drafter == "scripted":
        prompts = workload.prompts(model.vocab_size)
        truth = {i: prompt + decoded.tokens for i, (prompt, decoded) in enumerate(zip(prompts, want, strict=True))}
        script = [(right, num_spec - right) for right in range(1 + num_spec)]
        drafter = ScriptedDrafter(truth, script, model.vocab_size)
    return Engine(
        model,
        weights,
        StepConfig(workload.block_size, num_spec, conv_layout, mode.copies),
        batch=workload.batch,
        num_blocks=workload.num_blocks,
        max_tokens=workload.shared + workload.own + workload.output,
        prefix_cache=mode.prefix_cache,
        drafter=drafter,
        mesh=mesh,
    )


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], num_output: int, on_step: Callable[[int], Any]
) -> list[Request]:
    """Serves the prompts: the first alone until it generates, so that its blocks are published; then all others.

    Args:
      engine: an idle engine.
      prompts: token ids.
      num_output: tokens to generate for each.
      on_step: called after each step with the number of tokens that it generated.
    """
    requests = [engine.submit(prompts[0], num_output)]
    while not requests[0].output:
        on_step(engine.step())
    requests += [engine.submit(prompt, num_output) for prompt in prompts[1:]]
    while not engine.is_idle:
        on_step(engine.step())
    return requests


def decode_workload(model: LanguageModel, weights: Any, workload: Workload) -> list[Decoded]:
    """The workload as decoded plainly."""
    total = (workload.shared + workload.own + workload.output - 1) * workload.num_requests
    with _bar("plain decoding", total) as bar:
        prompts = workload.prompts(model.vocab_size)
        return decode_plainly(model, weights, prompts, workload.output, batch=workload.batch, progress=bar.update)


def measure(
    build: Callable[[Mode], Engine], mode: Mode, workload: Workload, want: Sequence[Decoded], *, tolerance: float
) -> tuple[Result, bool]:
    """Serves the workload in a mode, and compares all tokens with plain decoding.

    Args:
      build: makes an engine for a mode.
      mode: how to serve.
      workload: what to serve.
      want: the workload as decoded plainly.
      tolerance: as in `agrees`.

    Returns:
      The result, and whether the tokens are those of plain decoding.
    """
    engine = build(mode)
    prompts = workload.prompts(engine.model.vocab_size)
    # Two short prompts compile what the run needs: a step with a prompt and one without.
    serve(engine, [prompt[: workload.block_size + 2] for prompt in prompts[:2]], 4, on_step=lambda _: None)
    del engine  # Its pools make room for the next one's.
    result, requests = _run(build(mode), mode, prompts, workload)
    agree = [agrees(request.output, truth, tolerance) for request, truth in zip(requests, want, strict=True)]
    if not all(agree):
        print(f"{mode.name}: request {agree.index(False)} differs from plain decoding")
    return result, all(agree)


def _run(
    engine: Engine, mode: Mode, prompts: Sequence[Sequence[int]], workload: Workload
) -> tuple[Result, list[Request]]:
    """Serves the workload and measures it."""
    decode_seconds, decode_tokens, last = 0.0, 0, time.perf_counter()
    full: list[Step] = []  # decoding steps of a full batch
    with _bar(mode.name, workload.num_requests * workload.output) as bar:

        def on_step(num_output: int) -> None:
            nonlocal decode_seconds, decode_tokens, last
            now = time.perf_counter()
            step = engine.last_step
            if step and not step.plan.prefill.shape[1]:
                decode_seconds += now - last
                decode_tokens += num_output
                if step.plan.num_window.all():
                    full.append(step)
            bar.update(num_output)
            last = time.perf_counter()

        start = time.perf_counter()
        requests = serve(engine, prompts, workload.output, on_step)
        seconds = time.perf_counter() - start
    # Modes that differ from the first two in other things are not measured again.
    measured = full if mode.speculates and mode.prefix_cache else []
    by_copies = {_num_copies(step, engine.config): step for step in measured}
    extremes = sorted({min(by_copies), max(by_copies)}) if by_copies else []
    result = Result(
        mode=mode.name,
        seconds=seconds,
        tokens_per_second=engine.stats.num_output / seconds,
        decode_tokens_per_second=decode_tokens / decode_seconds,
        hit_rate=engine.stats.hit_rate,
        accepted_length=engine.stats.accepted_length,
        num_steps=engine.stats.num_steps,
        copy_costs=[_measure_copies(engine, by_copies[num_copies], num_copies) for num_copies in extremes],
    )
    return result, requests


def _num_copies(step: Step, config: StepConfig) -> int:
    """Copies of a request's state in a step: to its new running column before the forward, to its boundary after it."""
    before = jax.tree.map(np.asarray, step.plan.preprocess_inputs(step.slots, config.block_size))
    after = step.plan.postprocess_inputs(step.num_accepted, config.block_size)
    batch = len(step.num_accepted)
    rows = (row_steps(inputs, batch=batch, block_size=config.block_size) for inputs in (before, after))
    return sum(row.copies for row in itertools.chain(*rows))


def _measure_copies(engine: Engine, step: Step, num_copies: int, iterations: int = 8) -> CopyCost:
    """Times a step, and its copies alone, by repeating both on the states of an engine that has finished."""
    config = engine.config
    step = jax.device_put(step)

    def whole() -> None:
        engine.states, *_ = serve_step(
            engine.weights, engine.states, step.slots, step.plan, model=engine.model, config=config
        )
        jax.block_until_ready(engine.states)

    @functools.partial(jax.jit, donate_argnums=0)
    def copy(
        states: list[MambaState], slots: Slots, plan: StepPlan, num_accepted: jax.Array
    ) -> tuple[list[MambaState], Slots]:
        states, slots = preprocess(states, slots, plan, config)
        return postprocess(states, slots, plan, num_accepted, config)

    def copies() -> None:
        engine.states, _ = copy(engine.states, *step)
        jax.block_until_ready(engine.states)

    copies()
    step_seconds, _ = median_seconds(Untraced(whole), iterations=iterations)
    copy_seconds, _ = median_seconds(Untraced(copies), iterations=iterations)
    return CopyCost(num_copies, copy_seconds, step_seconds)


RESULT_HEADER = (
    f"\n{'mode':<20} {'tokens/s':>9} {'decoding':>9} {'hit rate':>9} {'accepted':>9} {'steps':>6} {'seconds':>8}"
    "  copies' share of a decoding step"
)


def result_line(result: Result) -> str:
    """A result as a line below `RESULT_HEADER`."""
    shares = ", ".join(
        f"{cost.copy_seconds / cost.step_seconds:.2%} with {cost.num_copies} copies" for cost in result.copy_costs
    )
    return (
        f"{result.mode:<20} {result.tokens_per_second:>9.1f} {result.decode_tokens_per_second:>9.1f} "
        f"{result.hit_rate:>9.1%} {result.accepted_length:>9.2f} {result.num_steps:>6} {result.seconds:>8.2f}  {shares}"
    )


def print_ratios(results: Sequence[Result]) -> None:
    """Prints how the first result compares with each other one."""
    first = results[0]
    for other in results[1:]:
        whole = first.tokens_per_second / other.tokens_per_second
        decoding = first.decode_tokens_per_second / other.decode_tokens_per_second
        print(f"{first.mode} / {other.mode}: {whole:.3f} in tokens/s, {decoding:.3f} while decoding")


def _bar(name: str, total: int) -> tqdm:
    """A progress bar on a terminal, for what takes longer than a moment."""
    return tqdm(desc=name, total=total, unit="token", delay=1, disable=None, leave=False)
