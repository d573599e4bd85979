"""Host-side validation of a step."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from layouts import MambaState, check_step
from pallas_kernels import PostprocessInputs, PreprocessInputs

_STATES = [
    MambaState(conv=jax.ShapeDtypeStruct((10, 4, 3), np.float32), temporal=jax.ShapeDtypeStruct((10, 8), np.float32))
]
_TABLES = np.array([[1, 2, 3], [4, 5, 6]], np.int32)


def _post(**changes: Any) -> PostprocessInputs:
    """Two requests with 15 tokens certain and 2 accepted: the boundary at 16 lies one column further."""
    vectors = {
        "mamba_state_idx": [1, 1],
        "num_accepted_tokens": [2, 2],
        "num_computed_tokens": [14, 14],
        "num_scheduled_tokens": [2, 2],
        "num_draft_tokens": [1, 1],
    }
    return PostprocessInputs(**{name: np.array(values, np.int32) for name, values in (vectors | changes).items()})


def _check(inputs: Any = None, tables: Any = _TABLES, states: Any = _STATES, **options: Any) -> None:
    check_step(states, inputs or _post(), tables, block_size=16, conv_layout="DS", **options)


def test_sound_step_passes() -> None:
    _check()


_BAD = {
    "accepted_below_one": ({"inputs": _post(num_accepted_tokens=[0, 2])}, ["row 0: num_accepted_tokens is 0, below 1"]),
    "source_column_outside": (
        {"inputs": _post(mamba_state_idx=[1, 3])},
        [
            "row 1: conv source column 3 is outside a table of 3 columns",
            "row 1: temporal source column 4 is outside a table of 3 columns",
        ],
    ),
    "temporal_column_outside": (
        {"inputs": _post(mamba_state_idx=[2, 1])},
        ["row 0: temporal source column 3 is outside a table of 3 columns"],
    ),
    "id_outside_the_pool": (
        {"tables": np.array([[1, 10, 3], [-4, 5, 6]], np.int32)},
        [
            "row 0: conv source block 10 is outside [0, 10) (group 0)",
            "row 1: conv destination block -4 is outside [0, 10) (group 0)",
        ],
    ),
    "destination_written_twice": (
        {"tables": np.array([[1, 2, 3], [1, 5, 6]], np.int32)},
        ["rows [0, 1]: all write conv block 1 (group 0)", "rows [0, 1]: all write temporal block 1 (group 0)"],
    ),
    "destination_read_by_another": (
        {"tables": np.array([[1, 2, 3], [4, 1, 6]], np.int32)},
        ["rows [1]: read conv block 1, which row 0 writes (group 0)"],
    ),
    "offset_beyond_the_window": (
        {
            "inputs": _post(
                mamba_state_idx=[0, 1],
                num_accepted_tokens=[6, 2],
                num_computed_tokens=[12, 14],
                num_draft_tokens=[5, 1],
                num_scheduled_tokens=[6, 2],
            ),
            "tables": np.array([[1, 2, 3, 7], [4, 5, 6, 8]], np.int32),
        },
        ["row 0: conv offset 3 is outside a window of 3 tokens"],
    ),
    "slot_shared": ({"idx_mapping": np.array([1, 1])}, ["rows [0, 1]: all have slot 1"]),
    "slot_outside": ({"idx_mapping": np.array([0, 2])}, ["row 1: slot 2 is outside [0, 2)"]),
}


@pytest.mark.parametrize(("options", "problems"), _BAD.values(), ids=_BAD)
def test_each_fault_is_listed_by_row(options: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(ValueError, match="the step is not well defined") as failure:
        _check(**options)
    for problem in problems:
        assert problem in str(failure.value)


def test_only_the_faults_are_listed() -> None:
    with pytest.raises(ValueError, match=re.escape("row 0: num_accepted_tokens is 0, below 1")) as failure:
        _check(_post(num_accepted_tokens=[0, 2]))
    assert len(str(failure.value).splitlines()) == 2


def test_padding_and_skipped_rows_may_hold_anything() -> None:
    rubbish = _post(mamba_state_idx=[1, 99], num_accepted_tokens=[2, -7])
    _check(rubbish, num_reqs=1)
    _check(rubbish, idx_mapping=np.array([0, -1]))


def test_null_blocks_are_no_fault() -> None:
    _check(tables=np.array([[0, 2, 3], [0, 5, 6]], np.int32))
    with pytest.raises(ValueError, match="all write conv block 0"):
        _check(tables=np.array([[0, 2, 3], [0, 5, 6]], np.int32), null_block_id=None)


def test_each_group_is_checked_against_its_own_table() -> None:
    states = [*_STATES, dataclasses.replace(_STATES[0], group=1)]
    tables = np.stack([_TABLES, np.array([[1, 2, 3], [1, 5, 6]], np.int32)])
    with pytest.raises(ValueError, match=r"all write conv block 1 \(group 1\)") as failure:
        _check(tables=tables, states=states)
    assert "(group 0)" not in str(failure.value)


def test_preprocess_steps_are_checked_too() -> None:
    inputs = PreprocessInputs(
        mamba_state_idx=np.array([0, 0], np.int32),
        num_accepted_tokens=np.array([1, 1], np.int32),
        num_computed_tokens=np.array([16, 48], np.int32),
        query_start_loc=np.array([0, 1, 2], np.int32),
    )
    with pytest.raises(ValueError, match="row 1: conv destination column 3 is outside a table of 3 columns"):
        _check(inputs)


def test_copy_onto_itself_is_no_write() -> None:
    # Row 0 stands on the boundary with its state in another column that names the same block.
    inputs = _post(
        mamba_state_idx=[1, 1], num_accepted_tokens=[1, 1], num_computed_tokens=[15, 3], num_draft_tokens=[1, 1]
    )
    _check(inputs, tables=np.array([[1, 1, 3], [4, 5, 1]], np.int32))


def test_malformed_states_and_tables_are_contract_errors() -> None:
    with pytest.raises(AssertionError, match=r"states\[0\] must be a MambaState"):
        _check(states=[np.zeros(3)])
    with pytest.raises(AssertionError, match=r"states\[0\]\.group is 1"):
        _check(states=[dataclasses.replace(_STATES[0], group=1)])
    with pytest.raises(ValueError, match="block_size must be positive, got 0"):
        check_step(_STATES, _post(), _TABLES, block_size=0, conv_layout="DS")
