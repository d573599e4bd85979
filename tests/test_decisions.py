"""The rules themselves, with expected values typed by hand."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, run

from layouts import MambaState
from pallas_kernels import PostprocessInputs
from pallas_kernels.plan import CopyBlocks, Postprocess, Preprocess, guarded


class Row(NamedTuple):
    """A request before a step and what must happen; `None` where nothing is copied."""

    name: str
    block_size: int
    idx: int
    accepted: int
    computed: int
    scheduled: int
    draft: int
    counter: int
    copy: tuple[int, int, int] | None  # source column, offset, destination column


ROWS = [
    Row("accepted_tokens_reach_no_boundary", 16, 1, 1, 30, 2, 1, counter=1, copy=None),
    Row("accepted_draft_reaches_boundary_in_place", 16, 1, 2, 30, 2, 1, counter=1, copy=(1, 1, 1)),
    Row("accepted_draft_reaches_boundary_elsewhere", 16, 2, 2, 30, 2, 1, counter=2, copy=(2, 1, 1)),
    Row("exact_boundary_in_place_resets_the_counter_only", 16, 1, 1, 31, 1, 0, counter=1, copy=None),
    Row("exact_boundary_elsewhere_copies_unshifted", 16, 2, 1, 31, 1, 0, counter=1, copy=(2, 0, 1)),
    Row("exact_boundary_with_rejected_drafts", 16, 1, 1, 31, 4, 3, counter=1, copy=None),
    Row("exact_boundary_and_more_accepted_resets_in_place", 16, 1, 3, 31, 4, 3, counter=1, copy=None),
    Row("boundary_in_the_middle_of_the_accepted", 16, 1, 4, 30, 4, 3, counter=1, copy=(1, 1, 1)),
    Row("two_boundaries_at_once_save_the_last", 4, 1, 7, 6, 7, 6, counter=7, copy=(1, 5, 2)),
    Row("nothing_accepted", 16, 1, 0, 31, 2, 1, counter=0, copy=None),
    Row("negative_accepted", 16, 1, -3, 31, 2, 1, counter=-3, copy=None),
    Row("request_without_a_block", 16, -1, 2, 30, 2, 1, counter=2, copy=None),
    Row("before_the_first_boundary", 16, 0, 2, 3, 2, 1, counter=2, copy=None),
    Row("no_boundary_at_zero_tokens", 16, 0, 1, 0, 1, 1, counter=1, copy=None),
    Row("no_boundary_below_zero", 16, 0, 1, -20, 1, 1, counter=1, copy=None),
    Row("block_size_1_saves_every_step", 1, 5, 3, 5, 3, 2, counter=3, copy=(5, 2, 7)),
    Row("block_size_1_one_token", 1, 5, 1, 5, 1, 0, counter=1, copy=None),
    Row("block_size_1616_crossed", 1616, 0, 3, 1614, 4, 3, counter=1, copy=(0, 1, 0)),
    Row("block_size_1616_not_crossed", 1616, 0, 1, 1614, 4, 3, counter=1, copy=None),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
@pytest.mark.parametrize("advanced", [False, True])
def test_planner_decides_as_typed(row: Row, advanced: bool) -> None:
    new = row.computed + row.scheduled - row.draft + row.accepted - 1
    counts = [new] if advanced else [row.computed, row.scheduled, row.draft]
    values = [jnp.int32(value) for value in (row.idx, row.accepted, *counts)]
    operation = Postprocess(row.block_size, advanced)
    decision = operation.decide(values, jnp.bool_(True))
    assert int(decision.updates[0]) == row.counter
    assert bool(decision.copies) == (row.copy is not None)
    if row.copy:
        # In a table of one block per column, ids are columns.
        ids = operation.block_ids(values, 0, lambda column: column)
        assert (int(ids.conv_src), int(decision.offset), int(ids.dst)) == row.copy
        assert int(ids.temporal_src) == row.copy[0] + row.copy[1]


@pytest.mark.parametrize(
    ("idx", "accepted", "computed", "scheduled", "preserve", "new_idx", "counter", "copy"),
    [
        pytest.param(-1, 1, 0, 5, False, 0, 1, None, id="fresh_request_starts_in_column_0"),
        pytest.param(0, 2, 10, 3, False, 0, 2, None, id="same_column_keeps_the_counter"),
        pytest.param(0, 2, 15, 3, False, 1, 1, (0, 1, 1), id="next_column_moves_the_accepted_state"),
        pytest.param(0, 2, 15, 3, True, 1, 2, (0, 1, 1), id="next_column_with_the_counter_preserved"),
        pytest.param(0, 1, 15, 1, False, 0, 1, None, id="last_token_of_a_block_stays_in_it"),
        pytest.param(0, 1, 16, 1, False, 1, 1, (0, 0, 1), id="first_token_of_a_block_moves"),
        pytest.param(2, 0, 70, 1, False, 4, 1, (2, 0, 4), id="nothing_accepted_shifts_by_nothing"),
        pytest.param(3, 1, 0, 5, False, 0, 1, (3, 0, 0), id="backwards"),
        pytest.param(0, 1, -20, 1, False, -2, 1, (0, 0, -2), id="negative_counts_round_down"),
    ],
)
def test_preprocess_planner_decides_as_typed(
    idx: int,
    accepted: int,
    computed: int,
    scheduled: int,
    preserve: bool,
    new_idx: int,
    counter: int,
    copy: tuple[int, int, int] | None,
) -> None:
    values = [jnp.int32(value) for value in (idx, accepted, computed, 7, 7 + scheduled)]
    operation = Preprocess(16, preserve)
    decision = operation.decide(values, jnp.bool_(True))
    assert [int(update) for update in decision.updates] == [new_idx, counter]
    assert bool(decision.copies) == (copy is not None)
    if copy:
        ids = operation.block_ids(values, 0, lambda column: column)
        assert (int(ids.conv_src), int(decision.offset), int(ids.dst)) == copy
        assert int(ids.temporal_src) == copy[0] + copy[1]
    padding = operation.decide(values, jnp.bool_(False))
    assert [int(update) for update in padding.updates] == [idx, accepted]
    assert not padding.copies


def test_copy_planner_takes_the_ids_of_each_group() -> None:
    # Groups 0 and 2 are used: sources, destinations, temporal sources, offset.
    operation = CopyBlocks((0, 2), has_temporal_src=True, has_offsets=True)
    values = [jnp.int32(value) for value in (1, 2, 3, 4, 5, 6, 7)]
    assert [int(block) for block in operation.block_ids(values, 2)] == [2, 6, 4]
    assert int(operation.decide(values, jnp.bool_(True)).offset) == 7
    plain = CopyBlocks((0,), has_temporal_src=False, has_offsets=False)
    rows = [jnp.array([1, 5, 1]), jnp.array([2, 5, 2])]
    assert plain.decide(rows, jnp.array([True, True, False])).copies.tolist() == [True, False, False]


def test_columns_outside_the_table_give_no_block() -> None:
    table = jnp.array([10, 11, 12])
    look_up = guarded(lambda column: table[column], 3)
    assert [int(look_up(jnp.int32(column))) for column in (-(2**31), -1, 0, 2, 3, 2**31 - 1)] == [
        -1,
        -1,
        10,
        12,
        -1,
        -1,
    ]


def test_planner_leaves_padding_alone() -> None:
    values = [jnp.array([value, value]) for value in (1, 2, 30, 2, 1)]
    decision = Postprocess(16, advanced=False).decide(values, jnp.array([True, False]))
    assert decision.copies.tolist() == [True, False]
    assert decision.updates[0].tolist() == [1, 2]


# Pools of four blocks whose values tell block, channel and token: 100 * block + 10 * channel + token.
_CONV = np.arange(4)[:, None, None] * 100 + np.arange(2)[:, None] * 10 + np.arange(4)
_TEMPORAL = np.arange(4)[:, None] * 100 + np.arange(4)

_UNTOUCHED = {block: [[100 * block + 10 * c + t for t in range(4)] for c in range(2)] for block in range(4)}


@pytest.mark.xdist_group("bytes_move_as_typed")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("idx", "accepted", "computed", "table", "conv", "temporal", "counter"),
    [
        pytest.param(
            # 7 tokens certain, 9 after the step, boundary at 8: offset 1 into column 1 = block 3. The
            # source is column 2 = block 1, its checkpoint after one more token column 3 = block 2.
            2, 3, 6, [0, 3, 1, 2],
            {3: [[101, 102, 103, 303], [111, 112, 113, 313]]}, {3: [200, 201, 202, 203]}, 3,
            id="boundary_copied_from_the_running_column",
        ),
        pytest.param(
            # The same tokens with the running state in column 1 = block 3: shifted in place.
            1, 3, 6, [0, 3, 1, 2],
            {3: [[301, 302, 303, 303], [311, 312, 313, 313]]}, {3: [100, 101, 102, 103]}, 1,
            id="boundary_normalised_in_place",
        ),
        pytest.param(
            # Columns 1 and 2 name the same physical block: the temporal copy onto itself is nothing.
            1, 3, 6, [0, 3, 3, 2],
            {3: [[301, 302, 303, 303], [311, 312, 313, 313]]}, {}, 1,
            id="two_columns_name_one_block",
        ),
        pytest.param(
            # Destination column 1 is the null block: nothing moves, the counter rule stands.
            1, 3, 6, [3, 0, 1, 2], {}, {}, 1,
            id="null_destination",
        ),
        pytest.param(
            # The temporal source, column 3, is outside a table of three columns; conv needs column 2 only.
            2, 3, 6, [0, 3, 1], {3: [[101, 102, 103, 303], [111, 112, 113, 313]]}, {}, 3,
            id="temporal_source_outside_the_table",
        ),
        pytest.param(
            # Block id 9 does not exist.
            2, 3, 6, [0, 3, 9, 2], {}, {3: [200, 201, 202, 203]}, 3,
            id="conv_source_outside_the_pool",
        ),
        pytest.param(
            # Offset 5 is beyond a window of four tokens: only the temporal state moves.
            0, 7, 2, [1, 3, 2, 2, 2, 2], {}, {3: [200, 201, 202, 203]}, 7,
            id="offset_beyond_the_window",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["DS", "SD"])
def test_bytes_move_as_typed(
    implementation: str,
    layout: str,
    idx: int,
    accepted: int,
    computed: int,
    table: list[int],
    conv: dict[int, list[list[int]]],
    temporal: dict[int, list[int]],
    counter: int,
) -> None:
    to_layout = (lambda pool: pool) if layout == "DS" else (lambda pool: pool.swapaxes(1, 2))
    draft = 6
    states, counters = run(
        "post",
        implementation,
        [MambaState(conv=to_layout(_CONV.astype(np.int32)), temporal=_TEMPORAL.astype(np.int32))],
        PostprocessInputs(
            mamba_state_idx=np.array([idx], np.int32),
            num_accepted_tokens=np.array([accepted], np.int32),
            num_computed_tokens=np.array([computed], np.int32),
            num_scheduled_tokens=np.array([draft + 1], np.int32),
            num_draft_tokens=np.array([draft], np.int32),
        ),
        np.array([table], np.int32),
        block_size=4,
        conv_layout=layout,
    )
    want_conv = [conv.get(block, _UNTOUCHED[block]) for block in range(4)]
    want_temporal = [temporal.get(block, _TEMPORAL[block].tolist()) for block in range(4)]
    assert to_layout(np.asarray(states[0].conv)).tolist() == want_conv
    assert np.asarray(states[0].temporal).tolist() == want_temporal
    assert counters.tolist() == [counter]


@pytest.mark.xdist_group("ds_bytes_are_sd_bytes")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
@pytest.mark.parametrize("offset", range(6))
def test_ds_bytes_are_sd_bytes_transposed(implementation: str, in_place: bool, offset: int) -> None:
    rng = np.random.default_rng(offset)
    pool = rng.integers(0, 2**16, (4, 24, 5), dtype=np.uint16)
    # 16 - offset tokens are certain and offset + 1 accepted, so the boundary at 16 lies `offset` ahead.
    inputs = PostprocessInputs(
        mamba_state_idx=np.array([0 if in_place else 1], np.int32),
        num_accepted_tokens=np.array([offset + 1], np.int32),
        num_computed_tokens=np.array([15 - offset], np.int32),
        num_scheduled_tokens=np.array([6], np.int32),
        num_draft_tokens=np.array([5], np.int32),
    )
    table = np.array([[2, 3]], np.int32)
    after = {}
    for layout, conv in {"DS": pool, "SD": pool.swapaxes(1, 2)}.items():
        (state,), _ = run(
            "post", implementation, [MambaState(conv=conv)], inputs, table, block_size=16, conv_layout=layout
        )
        after[layout] = np.asarray(state.conv)
    source = pool[2 if in_place else 3]
    want = pool.copy()
    want[2, :, : 5 - offset] = source[:, offset:]
    np.testing.assert_array_equal(after["DS"], want)
    np.testing.assert_array_equal(after["SD"].swapaxes(1, 2), want)
