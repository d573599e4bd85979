"""The engine generates what plain decoding generates, whatever is speculated, cached, batched, preempted or evicted."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import hypothesis
import jax
import mamba2_jax
import numpy as np
import pytest
from hypothesis import strategies as st

from layouts import check_step
from pallas_kernels.serving import (
    SIZES,
    Decoded,
    Engine,
    FusedCopies,
    Mamba2,
    NgramDrafter,
    ScriptedDrafter,
    SeparateCopies,
    StepConfig,
    agrees,
    decode_plainly,
    empty_cache,
)

pytestmark = pytest.mark.xdist_group("serving")

# One geometry, so that engines of equal settings share their compiled steps.
BATCH, NUM_SPEC, NUM_OUTPUT, MAX_TOKENS, VOCABULARY = 4, 3, 24, 64, 64
GEOMETRY = {"batch": BATCH, "num_blocks": 22, "max_tokens": MAX_TOKENS}

# (block size, most tokens of a prompt before a window, layout)
SETTINGS = [(1, 0, "DS"), (3, 2, "SD"), (8, 7, "DS"), (16, 0, "SD")]


@functools.cache
def _prompts() -> list[list[int]]:
    """Prompts that share prefixes of many lengths: at, before and after the boundaries of all block sizes."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCABULARY, 34).tolist()
    lengths = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33)
    return [shared[:length] + rng.integers(0, VOCABULARY, 1 + i % 5).tolist() for i, length in enumerate(lengths)]


@functools.cache
def _truth() -> list[Decoded]:
    model, weights = Mamba2.random("tiny")
    return decode_plainly(model, weights, _prompts(), NUM_OUTPUT, batch=BATCH)


def _scripted(chosen: Sequence[int], accepted: Sequence[int], num_drafts: int = NUM_SPEC) -> ScriptedDrafter:
    """Drafts of which `accepted` tokens are accepted, bonus included, in turn; request i has prompt `chosen[i]`."""
    truth = {i: _prompts()[prompt] + _truth()[prompt].tokens for i, prompt in enumerate(chosen)}
    script = [(count - 1, max(num_drafts + 1 - count, 0)) for count in accepted]
    return ScriptedDrafter(truth, script, VOCABULARY)


def _engine(config: StepConfig, **options: Any) -> Engine:
    return Engine(*Mamba2.random("tiny"), config, **GEOMETRY | options)


def _serve(
    engine: Engine,
    chosen: Sequence[int],
    num_output: Sequence[int],
    arrivals: Sequence[int] | None = None,
    preempted: Sequence[int] = (),
) -> list[list[int]]:
    """Serves prompts that arrive at given steps, preempts the oldest at others, and returns the outputs."""
    requests, step = [], 0
    arrivals = arrivals or [0] * len(chosen)
    while len(requests) < len(chosen) or not engine.is_idle:
        while len(requests) < len(chosen) and (arrivals[len(requests)] <= step or engine.is_idle):
            requests.append(engine.submit(_prompts()[chosen[len(requests)]], num_output[len(requests)]))
        if step in preempted and engine.running:
            engine.preempt(engine.running[0])
        engine.step()
        _assert_well_defined(engine)
        step += 1
        assert step < 1000, "the engine makes no progress"
    assert engine.num_available_blocks == GEOMETRY["num_blocks"] - 1
    return [request.output for request in requests]


def _assert_well_defined(engine: Engine) -> None:
    """Both copies of the last step kept the rules of the operations."""
    (slots, plan, num_accepted), config = engine.last_step, engine.config
    options = {"block_size": config.block_size, "conv_layout": config.conv_layout}
    for inputs in (
        plan.preprocess_inputs(slots, config.block_size),
        plan.postprocess_inputs(num_accepted, config.block_size),
    ):
        check_step(engine.states, inputs, plan.block_tables, **options)


def _wrong(outputs: list[list[int]], chosen: Sequence[int]) -> list[int]:
    """Requests whose tokens are not those of plain decoding."""
    truth = [_truth()[prompt].tokens for prompt in chosen]
    return [i for i, (output, tokens) in enumerate(zip(outputs, truth, strict=True)) if output != tokens[: len(output)]]


def test_window_is_bit_for_bit_its_tokens_one_by_one_in_any_row() -> None:
    model, weights = Mamba2.random("tiny")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, 12), np.int32)
    one_token, cache, logits = jax.jit(model.one_token), empty_cache(model, BATCH), []
    for token in tokens.T:
        after, cache = one_token(weights, cache, token)
        logits.append(after)
    length = np.full(BATCH, 12 - 1 - NUM_SPEC, np.int32)

    @jax.jit
    def in_window(tokens: Any) -> Any:
        start = model.prefill(weights, empty_cache(model, BATCH), tokens[:, : -1 - NUM_SPEC], length)
        return model.verify(weights, start, tokens[:, -1 - NUM_SPEC :])

    window, checkpoints = in_window(tokens)
    np.testing.assert_array_equal(window, np.stack(logits[-1 - NUM_SPEC :]))
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got[-1], want), checkpoints, cache)
    np.testing.assert_array_equal(in_window(tokens[::-1])[0][:, ::-1], window)


def test_one_token_steps_compute_what_the_package_computes_over_whole_texts() -> None:
    prompt, truth = _prompts()[-1], _truth()[-1]
    text = jax.numpy.asarray([prompt + truth.tokens[:-1]])
    logits = mamba2_jax.forward(mamba2_jax.create_random_model(SIZES["tiny"], seed=0), text)["logits"]
    logits = np.sort(np.asarray(logits[0, len(prompt) - 1 :]), axis=1), np.argmax(logits[0, len(prompt) - 1 :], axis=1)
    assert logits[1].tolist() == truth.tokens
    np.testing.assert_allclose(logits[0][:, -1] - logits[0][:, -2], truth.margins, atol=2e-5)


def test_texts_differ_and_no_choice_is_a_close_one() -> None:
    # Else equal tokens would say little, and different ones might be chance.
    assert len({tuple(decoded.tokens) for decoded in _truth()}) == len(_prompts())
    assert all(len(set(decoded.tokens)) > NUM_OUTPUT // 2 for decoded in _truth())
    assert min(min(decoded.margins) for decoded in _truth()) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "prefill_tokens", "conv_layout"), SETTINGS, ids=str)
def test_tokens_are_those_of_plain_decoding(block_size: int, prefill_tokens: int, conv_layout: str) -> None:
    config = StepConfig(block_size, NUM_SPEC, conv_layout)
    seen = {"preemptions": 0, "cached": 0}

    @hypothesis.settings(deadline=None, derandomize=True, database=None, max_examples=10)
    @hypothesis.given(st.data())
    def check(data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 7), "requests")
        chosen = data.draw(st.lists(st.sampled_from(range(len(_prompts()))), min_size=count, max_size=count), "prompts")
        num_output = data.draw(st.lists(st.integers(1, NUM_OUTPUT), min_size=count, max_size=count), "output")
        arrivals = sorted(data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count), "arrivals"))
        accepted = data.draw(st.lists(st.integers(1, 1 + NUM_SPEC), min_size=1, max_size=6), "accepted")
        num_drafts = data.draw(st.integers(0, NUM_SPEC), "drafts")
        preempted = data.draw(st.sets(st.integers(1, 30), max_size=3), "preempted")
        engine = _engine(
            config,
            prefill_tokens=prefill_tokens,
            prefix_cache=data.draw(st.booleans(), "prefix cache"),
            drafter=data.draw(st.sampled_from([_scripted(chosen, accepted, num_drafts), NgramDrafter()]), "drafter"),
        )
        outputs = _serve(engine, chosen, num_output, arrivals, sorted(preempted))
        assert [len(output) for output in outputs] == num_output
        assert _wrong(outputs, chosen) == []
        seen["preemptions"] += engine.stats.num_preemptions
        seen["cached"] += engine.stats.num_cached

    check()
    assert all(seen.values()), seen


@pytest.mark.parametrize("accepted", range(1, 2 + NUM_SPEC))
def test_every_accepted_count_is_reached_and_right(accepted: int) -> None:
    engine = _engine(StepConfig(1, NUM_SPEC), prefill_tokens=0, drafter=_scripted([5], [accepted]))
    outputs = _serve(engine, [5], [5 * accepted])
    assert engine.stats.num_windows == 5
    assert _wrong(outputs, [5]) == []


def test_second_request_of_a_prompt_starts_from_its_last_boundary() -> None:
    engine = _engine(StepConfig(8, NUM_SPEC), prefill_tokens=7)
    first = _serve(engine, [12], [NUM_OUTPUT])
    assert engine.stats.num_cached == 0
    again = _serve(engine, [12], [NUM_OUTPUT])
    assert len(_prompts()[12]) == 35
    assert engine.stats.num_cached == 32
    assert first == again
    assert _wrong(again, [12]) == []


def test_eviction_leaves_tokens_right() -> None:
    engine = _engine(StepConfig(8, NUM_SPEC), prefill_tokens=7)
    chosen = [*range(14), *range(14)]
    outputs = _serve(engine, chosen, [NUM_OUTPUT] * len(chosen))
    assert engine.num_evictions > 20
    assert engine.stats.num_cached > 0
    assert _wrong(outputs, chosen) == []


def test_output_is_cached_too() -> None:
    engine = _engine(StepConfig(8, NUM_SPEC), prefill_tokens=7, drafter=_scripted([0, 0], [4, 1, 3]))
    _serve(engine, [0], [NUM_OUTPUT])
    text = _prompts()[0] + _truth()[0].tokens
    longer = engine.submit(text[:18], 6)
    engine.run()
    assert longer.num_cached == 16
    assert longer.output == text[18:24]


def test_without_prefix_cache_nothing_is_cached() -> None:
    engine = _engine(StepConfig(8, NUM_SPEC), prefill_tokens=7, prefix_cache=False)
    outputs = _serve(engine, [12, 12, 12, 12, 12], [4] * 5)
    assert engine.stats.num_cached == 0
    assert _wrong(outputs, [12] * 5) == []


def test_without_speculation_tokens_are_the_same() -> None:
    engine = _engine(StepConfig(3, 0), prefill_tokens=0)
    outputs = _serve(engine, [12, 12, 3, 5, 12], [NUM_OUTPUT] * 5, arrivals=[0, 1, 2, 3, 60])
    assert engine.stats.accepted_length == 1
    assert engine.stats.num_cached > 0
    assert _wrong(outputs, [12, 12, 3, 5, 12]) == []


def test_separate_copies_give_the_same_tokens() -> None:
    chosen = [12, 3, 12, 8, 9]
    config = StepConfig(3, NUM_SPEC, "DS", SeparateCopies())
    outputs = _serve(_engine(config, prefill_tokens=0, drafter=_scripted(chosen, [4, 2, 1, 3])), chosen, [20] * 5)
    assert _wrong(outputs, chosen) == []


@pytest.mark.slow
def test_kernel_in_the_interpreter_gives_the_same_tokens() -> None:
    chosen = [2, 2]
    config = StepConfig(3, NUM_SPEC, "DS", FusedCopies(interpret=True))
    engine = _engine(config, prefill_tokens=0, drafter=_scripted(chosen, [3, 4]))
    outputs = _serve(engine, chosen, [6, 2], arrivals=[0, 5])
    assert engine.stats.num_cached > 0
    assert _wrong(outputs, chosen) == []


@dataclasses.dataclass(frozen=True)
class _SavesOffByOne(FusedCopies):
    """Saves the state one token before the boundary where a draft was accepted."""

    def postprocess(self, states: Any, inputs: Any, block_tables: Any, **options: Any) -> Any:
        late = (inputs.num_accepted_tokens > 1).astype(np.int32)
        wrong = dataclasses.replace(
            inputs,
            num_computed_tokens=inputs.num_computed_tokens + late,
            num_accepted_tokens=inputs.num_accepted_tokens - late,
        )
        _, counter = super().postprocess(states, inputs, block_tables, **options)
        states, _ = super().postprocess(states, wrong, block_tables, **options)
        return states, counter


@dataclasses.dataclass(frozen=True)
class _MovesOffByOne(FusedCopies):
    """Moves the state before the last accepted token into a new running column."""

    def preprocess(self, states: Any, inputs: Any, block_tables: Any, **options: Any) -> Any:
        accepted = inputs.num_accepted_tokens
        wrong = dataclasses.replace(inputs, num_accepted_tokens=jax.numpy.maximum(accepted - 1, 1))
        states, idx, _ = super().preprocess(states, wrong, block_tables, **options)
        return states, idx, jax.numpy.where(idx == inputs.mamba_state_idx, accepted, 1)


@dataclasses.dataclass(frozen=True)
class _CounterNotReset(FusedCopies):
    """Leaves the counter of a state that was normalised in place."""

    def postprocess(self, states: Any, inputs: Any, block_tables: Any, **options: Any) -> Any:
        states, _ = super().postprocess(states, inputs, block_tables, **options)
        return states, inputs.num_accepted_tokens


@pytest.mark.parametrize("copies", [FusedCopies(), _SavesOffByOne(), _MovesOffByOne(), _CounterNotReset()], ids=str)
def test_broken_copy_is_noticed(copies: FusedCopies) -> None:
    # Windows of all lengths, all accepted: states are normalised in place at every offset.
    drafter = _scripted([0, 1, 2, 3] * 2, [2, 3, 2, 4, 3], num_drafts=0)
    engine = _engine(StepConfig(8, NUM_SPEC, "DS", copies), prefill_tokens=0, drafter=drafter)
    outputs = _serve(engine, range(4), [NUM_OUTPUT] * 4)
    texts = [_prompts()[i] + _truth()[i].tokens for i in range(4)]
    # Then from what was saved on the way.
    later = [engine.submit(text[:-4], 4) for text in texts]
    engine.run()
    right = _wrong(outputs, range(4)) == [] and [request.output for request in later] == [text[-4:] for text in texts]
    assert right == (copies == FusedCopies())
    if right:
        assert all(request.num_cached > len(_prompts()[i]) for i, request in enumerate(later))


def _check_two_devices(devices: Sequence[Any], implementation: str | None, conv_layout: str) -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    config = StepConfig(3, NUM_SPEC, conv_layout, FusedCopies(implementation, mesh=mesh))
    chosen = [12, 3, 12, 8, 9]
    engine = _engine(config, prefill_tokens=0, drafter=_scripted(chosen, [4, 2, 1, 3]), mesh=mesh)
    outputs = _serve(engine, chosen, [NUM_OUTPUT] * 5)
    for state in engine.states:
        assert state.conv.sharding.shard_shape(state.conv.shape).count(40) == 1, "half of 80 channels per device"
        assert state.temporal.sharding.shard_shape(state.temporal.shape)[1] == 4, "half of 8 heads per device"
    # Sums are split over the devices, so that logits may differ in their last bits.
    assert all(agrees(output, _truth()[i], tolerance=1e-3) for i, output in zip(chosen, outputs, strict=True))


def test_tensor_parallelism_gives_the_same_tokens() -> None:
    _check_two_devices(jax.devices("cpu")[:2], "xla", "DS")


@pytest.mark.gpu
@pytest.mark.skipif(jax.device_count() < 2 or jax.default_backend() != "gpu", reason="Needs two GPUs in one host.")
@pytest.mark.parametrize("conv_layout", ["DS", "SD"])
def test_two_gpus_give_the_same_tokens(conv_layout: str) -> None:
    _check_two_devices(jax.devices()[:2], "mosaic_gpu", conv_layout)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize(("block_size", "prefill_tokens", "conv_layout"), [(1, 0, "DS"), (3, 2, "SD"), (8, 7, "DS")])
def test_gpu_gives_the_tokens_of_plain_decoding(
    block_size: int, prefill_tokens: int, conv_layout: str, implementation: str
) -> None:
    chosen = [12, 3, 12, 8, 9, 11, 13, 12]
    config = StepConfig(block_size, NUM_SPEC, conv_layout, FusedCopies(implementation))
    engine = _engine(config, prefill_tokens=prefill_tokens, drafter=_scripted(chosen, [4, 2, 1, 3, 3]))
    outputs = _serve(engine, chosen, [NUM_OUTPUT] * 8, arrivals=[0, 1, 2, 3, 30, 31, 40, 50], preempted=[7, 20])
    assert engine.stats.num_cached > 0
    assert engine.stats.num_preemptions > 0
    assert _wrong(outputs, chosen) == []


def test_agreement_forgives_only_a_close_first_difference() -> None:
    want = Decoded([1, 2, 3], [0.5, 1e-4, 0.5])
    assert agrees([1, 2, 3], want)
    assert not agrees([1, 9, 3], want)
    assert agrees([1, 9, 9], want, tolerance=1e-3)
    assert not agrees([9, 2, 3], want, tolerance=1e-3)


def test_no_more_requests_are_admitted_than_have_blocks() -> None:
    engine = _engine(StepConfig(8, NUM_SPEC), num_blocks=8)  # Six for each.
    for prompt in ([1, 2], [3, 4]):
        engine.submit(prompt, 3)
    engine.step()
    assert [request.request_id for request in engine.running] == [0]
    engine.run()
    assert engine.stats.num_preemptions == 0


def test_too_small_pools_and_unservable_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be more than 6, got 6"):
        _engine(StepConfig(8, NUM_SPEC), num_blocks=6)
    engine = _engine(StepConfig(8, NUM_SPEC))
    for prompt, num_output in (([], 1), ([1], 0), ([1] * 60, 5)):
        with pytest.raises(ValueError, match="a request needs a prompt"):
            engine.submit(prompt, num_output)
    request = engine.submit([1, 2], 1)
    for _ in range(2):  # waiting, and finished
        with pytest.raises(ValueError, match="request 0 is not running here"):
            engine.preempt(request)
        engine.run()
    with pytest.raises(ValueError, match="size must be one of tiny, 130m, got 'huge'"):
        Mamba2.random("huge")
