"""Faults that other implementations of this copy have had, each with the smallest input that shows it.

Two more are named elsewhere: ids times a stride beyond 2**31 in tests/test_large_pool.py, and the bytes of a bf16 pool
that a float move changes in tests/test_properties.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, assert_same_bytes, run

from layouts import MambaState
from pallas_kernels import PostprocessInputs, copy_mamba_blocks, postprocess_mamba

pytestmark = [pytest.mark.xdist_group("known_faults"), pytest.mark.parametrize("implementation", IMPLEMENTATIONS)]

BLOCK_SIZE = 4
# Seven blocks: the conv state 100 * block + 10 * channel + token, the temporal state 100 * block + element.
CONV = (100 * np.arange(7)[:, None, None] + 10 * np.arange(2)[:, None] + np.arange(4)).astype(np.int32)
TEMPORAL = (100 * np.arange(7)[:, None] + np.arange(4)).astype(np.int32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def requests(*rows: tuple[int, int, int]) -> PostprocessInputs:
    """Requests as (running column, accepted tokens, tokens that are certain), with 6 drafts each."""
    idx, accepted, running = ints(*rows).T
    drafts = np.full_like(idx, 6)
    return PostprocessInputs(
        mamba_state_idx=idx,
        num_accepted_tokens=accepted,
        num_computed_tokens=running - 1,
        num_scheduled_tokens=drafts + 1,
        num_draft_tokens=drafts,
    )


IDLE = (0, 1, 1)  # far from any boundary
CROSSES = (2, 3, 7)  # from column 2 to the boundary at 8, in column 1, at offset 1
TABLES = ints([1, 2, 3, 4], [5, 6, 0, 0])


def post(
    implementation: str,
    inputs: PostprocessInputs,
    tables: np.ndarray = TABLES,
    states: Any = None,
    layout: str = "DS",
    **options: Any,
) -> tuple[list[MambaState], list[int]]:
    states = [MambaState(conv=CONV, temporal=TEMPORAL)] if states is None else states
    states, counter = run(
        "post", implementation, states, inputs, tables, block_size=BLOCK_SIZE, conv_layout=layout, **options
    )
    return states, counter.tolist()


def check(state: MambaState, conv: dict[int, Any], temporal: dict[int, Any]) -> None:
    """Asserts that these blocks, and no others, hold something new."""
    want = MambaState(conv=CONV.copy(), temporal=TEMPORAL.copy(), group=state.group)
    for block, window in conv.items():
        want.conv[block] = window
    for block, values in temporal.items():
        want.temporal[block] = values
    assert_same_bytes(state, want)


# What CROSSES leaves in block 2, with TABLES: block 3 shifted by one token, and block 4.
SAVED = {2: [[301, 302, 303, 203], [311, 312, 313, 213]]}, {2: [400, 401, 402, 403]}


def test_ds_window_is_not_shifted_along_its_channels(implementation: str) -> None:
    # With two accepted tokens the offset is 1: an SD copy of the same bytes would move whole channels.
    (state,), _ = post(implementation, requests((2, 2, 7), IDLE))
    check(state, *SAVED)


def test_destination_rows_keep_the_stride_of_the_whole_window(implementation: str) -> None:
    pool = np.arange(2 * 10240 * 6, dtype=np.int32).astype(np.int16).reshape(2, 10240, 6)
    inputs, table = requests((1, 2, 3)), ints([0, 1])
    (state,), _ = post(implementation, inputs, table, [MambaState(conv=pool)], null_block_id=None)
    want = pool.copy()
    want[0, :, :5] = pool[1, :, 1:]
    np.testing.assert_array_equal(state.conv, want)


def test_shift_inside_one_block_reads_before_it_writes(implementation: str) -> None:
    (state,), _ = post(implementation, requests((1, 3, 7), IDLE))
    check(state, {2: [[201, 202, 203, 203], [211, 212, 213, 213]]}, {2: [300, 301, 302, 303]})


def test_equal_columns_are_not_equal_blocks_nor_the_other_way_round(implementation: str) -> None:
    # Columns 1 and 2 differ and name one block: the conv window shifts in place, and the counter stays.
    (state,), counter = post(implementation, requests(CROSSES, IDLE), ints([1, 2, 2, 4], [5, 6, 0, 0]))
    check(state, {2: [[201, 202, 203, 203], [211, 212, 213, 213]]}, {2: [400, 401, 402, 403]})
    assert counter == [3, 1]


def test_nothing_accepted_reads_no_column_before_the_first(implementation: str) -> None:
    # Eight tokens are certain, a boundary: one accepted token fewer than one would point to offset -1.
    (state,), counter = post(implementation, requests((0, 0, 9), (1, 0, 8)))
    check(state, {}, {})
    assert counter == [0, 0]


def test_table_row_is_the_one_of_the_batch_not_of_the_slot(implementation: str) -> None:
    # Batch row 0 is slot 1, which crosses; slot 0 belongs to row 1 and is idle.
    (state,), counter = post(implementation, requests(IDLE, CROSSES), idx_mapping=ints(1, 0))
    check(state, *SAVED)
    assert counter == [1, 3]


def test_padded_row_is_not_taken_for_the_last_live_slot(implementation: str) -> None:
    # Row 1 is padding, with a slot that a clamp would make 1: the one that row 0 has.
    for padding in (-1, 2, 2**31 - 1):
        (state,), counter = post(implementation, requests(IDLE, (1, 3, 7)), idx_mapping=ints(1, padding))
        check(state, {2: [[201, 202, 203, 203], [211, 212, 213, 213]]}, {2: [300, 301, 302, 303]})
        assert counter == [1, 1]


def test_negative_ids_and_columns_do_not_wrap_to_the_last_block(implementation: str) -> None:
    # A destination of -1, and a request without a running column.
    (state,), counter = post(implementation, requests(CROSSES, (-1, 3, 7)), ints([1, -1, 3, 4], [5, 6, 0, 0]))
    check(state, {}, {})
    assert counter == [3, 3]


def test_null_block_is_no_source(implementation: str) -> None:
    # Row 0 has it as conv source only, row 1 as temporal source only.
    (state,), _ = post(implementation, requests(CROSSES, CROSSES), ints([1, 2, 0, 4], [5, 6, 3, 0]))
    check(state, {6: [[301, 302, 303, 603], [311, 312, 313, 613]]}, {2: [400, 401, 402, 403]})


def test_each_group_reads_its_own_table(implementation: str) -> None:
    tables = np.stack([TABLES, ints([1, 6, 5, 4], [2, 3, 0, 0])])
    states = [MambaState(conv=CONV, temporal=TEMPORAL, group=group) for group in (1, 0)]
    (second, first), _ = post(implementation, requests(CROSSES, IDLE), tables, states)
    check(first, *SAVED)
    check(second, {6: [[501, 502, 503, 603], [511, 512, 513, 613]]}, {6: [400, 401, 402, 403]})


def test_two_byte_conv_moves_beside_a_four_byte_temporal_state(implementation: str) -> None:
    conv = np.arange(7 * 2 * 4, dtype=np.uint16).view(jnp.bfloat16).reshape(7, 2, 4)
    temporal = TEMPORAL.astype(np.float32)
    (state,), _ = post(implementation, requests(CROSSES, IDLE), states=[MambaState(conv=conv, temporal=temporal)])
    want = MambaState(conv=conv.copy(), temporal=temporal.copy())
    want.conv[2, :, :3], want.temporal[2] = conv[3, :, 1:], temporal[4]
    assert_same_bytes(state, want)


@pytest.mark.parametrize("layout", ["DS", "SD"])
def test_last_tokens_of_the_destination_stay(implementation: str, layout: str) -> None:
    # Offset 3: one token moves and three stay.
    conv = CONV if layout == "DS" else np.ascontiguousarray(CONV.swapaxes(1, 2))
    (state,), _ = post(implementation, requests((2, 4, 5), IDLE), states=[MambaState(conv=conv)], layout=layout)
    got = np.asarray(state.conv) if layout == "DS" else np.asarray(state.conv).swapaxes(1, 2)
    assert got[2].tolist() == [[303, 201, 202, 203], [313, 211, 212, 213]]
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(CONV, 2, axis=0))


def test_counter_is_reset_where_no_byte_moves(implementation: str) -> None:
    # Row 0 stands on the boundary in its own column; row 1 would copy, but to the null block.
    (state,), counter = post(implementation, requests((1, 3, 8), (1, 3, 7)), ints([1, 2, 3, 4], [5, 0, 6, 0]))
    check(state, {}, {})
    assert counter == [1, 1]


def test_table_narrower_than_the_offset_skips_the_temporal_copy_only(implementation: str) -> None:
    # The temporal source would be column 3 of three.
    (state,), _ = post(implementation, requests(CROSSES, IDLE), TABLES[:, :3])
    check(state, SAVED[0], {})


def test_pool_that_someone_still_holds_is_not_changed_behind_their_back(implementation: str) -> None:
    options = {"interpret": True} if implementation == "interpret" else {"implementation": implementation}
    pool = jnp.asarray(TEMPORAL)
    blocks = jnp.array([1], jnp.int32), jnp.array([2], jnp.int32)

    # Inside a program that uses the old pool after the copy, XLA keeps a copy of it.
    @jax.jit
    def both(pool: jax.Array) -> Any:
        (state,) = copy_mamba_blocks([MambaState(temporal=pool)], *blocks, conv_layout="DS", **options)
        return pool + 0, state.temporal

    before, after = both(pool)
    np.testing.assert_array_equal(before, TEMPORAL)
    assert after[2].tolist() == [100, 101, 102, 103]
    # Outside, the old array is gone, and JAX says so.
    held = pool
    copy_mamba_blocks([MambaState(temporal=pool)], *blocks, conv_layout="DS", **options)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(held)
    # A view that NumPy holds forbids the donation: its bytes stay.
    pool = jnp.array(TEMPORAL)
    view = np.asarray(pool)
    inputs, table = jax.tree.map(jnp.asarray, (requests((1, 2, 7)), TABLES[:1]))
    postprocess_mamba([MambaState(temporal=pool)], inputs, table, block_size=BLOCK_SIZE, conv_layout="DS", **options)
    np.testing.assert_array_equal(view, TEMPORAL)
