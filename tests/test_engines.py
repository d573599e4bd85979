"""The README's section for engines: its table converts as it says, and its step decodes as one token at a time does.

The third column of the table is code. The tests evaluate it on arrays as the other engine has them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from layouts import ConvStateLayout, MambaState
from pallas_kernels import PostprocessInputs, copy_mamba_blocks, postprocess_mamba

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
TABLE = {
    (engine, there): code
    for engine, there, code in re.findall(r"^\| ([\w -]+) \| (.+?) \| `(.+)` \|$", README, re.MULTILINE)
}
tested: set[tuple[str, str]] = set()


def row(engine: str, there: str) -> Callable[[Any], Any]:
    """Gives a test the code of the table's row that begins so."""
    (key,) = (key for key in TABLE if key[0] == engine and key[1].startswith(there))
    tested.add(key)
    return pytest.mark.parametrize("here", [TABLE[key]], ids=[engine.replace(" ", "-")])


def keywords(here: str, **theirs: Any) -> dict[str, Any]:
    """The keywords that the table's code makes of the other engine's values."""
    return eval(f"dict({here})", {"jnp": jnp}, theirs)


def ints(*values: Any) -> Any:
    return jnp.array(values, jnp.int32)


# Nine blocks. Block b holds the inputs 10b, 10b + 1 and 10b + 2 of one channel, and the temporal state b.
CONV = [
    [0, 1, 2],
    [10, 11, 12],
    [20, 21, 22],
    [30, 31, 32],
    [40, 41, 42],
    [50, 51, 52],
    [60, 61, 62],
    [70, 71, 72],
    [80, 81, 82],
]
TEMPORAL = [0, 1, 2, 3, 4, 5, 6, 7, 8]


def pools(layout: str = "DS", group: int = 0) -> MambaState:
    conv = jnp.expand_dims(ints(*CONV), ConvStateLayout(layout).dim_axis)
    return MambaState(conv=conv, temporal=ints(*TEMPORAL), group=group)


def check(state: MambaState, conv: dict[int, list[int]], temporal: dict[int, int]) -> None:
    """Asserts that these blocks, and no others, hold something new."""
    want = [conv.get(block, window) for block, window in enumerate(CONV)]
    assert np.asarray(state.conv).reshape(9, 3).tolist() == want
    assert state.temporal.tolist() == [temporal.get(block, count) for block, count in enumerate(TEMPORAL)]


def post(**changes: Any) -> tuple[MambaState, list[int]]:
    """A step of two requests with 6 computed tokens each, 3 scheduled ones and blocks of 4 tokens.

    Request 0 accepts 2 tokens, just enough to reach token 8; request 1 accepts 1, just too few.
    """
    arguments = {
        "mamba_state_idx": ints(2, 2),
        "num_accepted_tokens": ints(2, 1),
        "num_computed_tokens": ints(6, 6),
        "num_scheduled_tokens": ints(3, 3),
        "num_draft_tokens": ints(2, 2),
        "block_tables": ints([5, 2, 6, 3], [1, 4, 7, 8]),
        "conv_layout": "DS",
        "states": [pools()],
    } | changes
    inputs = PostprocessInputs(**{name: arguments.pop(name) for name in PostprocessInputs.__dataclass_fields__})
    tables, states = arguments.pop("block_tables"), arguments.pop("states")
    states, counter = postprocess_mamba(states, inputs, tables, block_size=4, **arguments)
    return states[-1], counter.tolist()


def check_post(state: MambaState) -> None:
    """Token 8 is one token beyond what was certain: block 6 shifted by 1, and temporal block 3, go to block 2."""
    check(state, {2: [61, 62, 22]}, {2: 3})


@row("vLLM", "`num_accepted_tokens`")
def test_accepted_tokens_of_vllm_are_ours(here: str) -> None:
    state, counter = post(**keywords(here, num_accepted_tokens=ints(2, 1)))
    check_post(state)
    assert counter == [2, 1]


@row("vLLM V2", "`num_sampled`")
def test_a_prefill_chunk_that_samples_nothing_counts_as_one_token(here: str) -> None:
    state, counter = post(**keywords(here, num_sampled=ints(2, 0)))
    check_post(state)
    assert counter == [2, 1]


@row("vLLM V1", "`num_draft_tokens_buf`")
def test_scheduled_tokens_of_vllm_include_the_drafts(here: str) -> None:
    # Four scheduled tokens after five, two of them drafts: again 7 tokens are certain.
    state, _ = post(
        num_computed_tokens=ints(5, 5),
        num_scheduled_tokens=ints(4, 4),
        **keywords(here, num_draft_tokens_buf=ints(2, 2)),
    )
    check_post(state)


@row("vLLM V2", "`num_computed_tokens`")
def test_advanced_counts_need_no_scheduled_tokens(here: str) -> None:
    state, counter = post(num_computed_tokens=ints(8, 7), **keywords(here))
    check_post(state)
    assert counter == [2, 1]


@row("vLLM V2", "`idx_mapping`")
def test_rows_find_their_slots(here: str) -> None:
    # Row 0 is skipped, row 1 is slot 1 and row 2 is slot 0.
    tables = ints([5, 1, 6, 3], [1, 4, 7, 8], [5, 2, 6, 3])
    state, counter = post(block_tables=tables, **keywords(here, idx_mapping=ints(-1, 1, 0)))
    check_post(state)
    assert counter == [2, 1]


@row("vLLM V2", "`block_tables`")
def test_tables_in_slot_order_are_gathered(here: str) -> None:
    mapping = ints(1, 0, -1)
    tables = ints([5, 2, 6, 3], [1, 4, 7, 8])
    state, _ = post(idx_mapping=mapping, **keywords(here, block_tables=tables, idx_mapping=mapping))
    check_post(state)


@row("vLLM", "`block_tables`")
def test_every_group_has_its_table(here: str) -> None:
    tables = [ints([8, 7, 4, 1], [5, 2, 6, 3]), ints([5, 2, 6, 3], [1, 4, 7, 8])]
    state, _ = post(states=[pools(group=0), pools(group=1)], **keywords(here, block_tables=tables))
    check_post(state)
    state, _ = post(states=[pools(group=1), pools(group=0)], **keywords(here, block_tables=tables))
    check(state, {7: [41, 42, 72]}, {7: 1})


@row("vLLM", "null block 0")
def test_the_null_block_is_copied_on_demand(here: str) -> None:
    tables = ints([5, 0, 6, 3], [1, 4, 7, 8])
    state, _ = post(block_tables=tables, **keywords(here))
    check(state, {0: [61, 62, 2]}, {0: 3})
    state, _ = post(block_tables=tables)
    check(state, {}, {})


@pytest.mark.parametrize("layout", ["SD", "DS"])
@row("vLLM", "`get_conv_state_layout()`")
def test_conv_layouts_have_the_names_of_vllm(here: str, layout: str) -> None:
    state, _ = post(states=[pools(layout)], **keywords(here, get_conv_state_layout=lambda: layout))
    check_post(state)


@row("tpu-inference", "`read_offsets`")
def test_a_read_offset_lacks_the_bonus_token(here: str) -> None:
    state, counter = post(**keywords(here, read_offsets=ints(1, 0)))
    check_post(state)
    assert counter == [2, 1]


@row("tpu-inference", "`mamba_state_indices`")
def test_a_read_offset_names_the_slot_of_its_checkpoint(here: str) -> None:
    # Two requests of three slots each, the first at 1 and the second at 4. They are saved to 7 and 8.
    theirs = {"mamba_state_indices": ints(1, 4), "read_offsets": ints(2, 0)}
    state = copy_mamba_blocks(pools("SD"), **keywords(here, **theirs), dst_blocks=ints(7, 8), conv_layout="SD")
    check(state, {7: [30, 31, 32], 8: [40, 41, 42]}, {7: 3, 8: 4})


@row("tpu-inference", "`mamba_state_indices_cpu`")
def test_slots_become_local_to_their_rank(here: str) -> None:
    # Rank 1 owns the slots from 9 on: 10 is its slot 1, and 13 its slot 4.
    sources = keywords(here, mamba_state_indices_cpu=ints(10, 13), local_slots=9)
    state = copy_mamba_blocks(pools("SD"), **sources, dst_blocks=ints(7, 8), conv_layout="SD")
    check(state, {7: [10, 11, 12], 8: [40, 41, 42]}, {7: 1, 8: 4})


@row("tpu-inference", "null slot 0")
def test_padding_rows_name_the_null_slot(here: str) -> None:
    slots = {"src_blocks": ints(1, 0, 2), "dst_blocks": ints(7, 8, 0)}
    state = copy_mamba_blocks(pools("SD"), **slots, conv_layout="SD", **keywords(here))
    check(state, {7: [10, 11, 12]}, {7: 1})


@row("tpu-inference", "conv")
def test_conv_windows_of_tpu_inference_are_sd(here: str) -> None:
    # Slots of two tokens, three channels.
    conv = ints([[0, 0, 0], [0, 0, 0]], [[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [7, 8, 9]])
    # The shift tells the axes apart: the last token goes to the front.
    state = MambaState(conv=conv)
    state = copy_mamba_blocks(state, ints(1), ints(2), ints(1), **keywords(here))
    assert state.conv.tolist() == [[[0, 0, 0], [0, 0, 0]], [[1, 2, 3], [4, 5, 6]], [[4, 5, 6], [7, 8, 9]]]


@row("sglang-jax", "`accept_lens`")
def test_accept_lens_of_sglang_jax_are_ours(here: str) -> None:
    # A padding row has 0 and is left alone.
    tables = ints([5, 2, 6, 3], [1, 4, 7, 8], [1, 4, 7, 8])
    state, counter = post(
        mamba_state_idx=ints(2, 2, 2),
        num_computed_tokens=ints(6, 6, 6),
        num_scheduled_tokens=ints(3, 3, 3),
        num_draft_tokens=ints(2, 2, 2),
        block_tables=tables,
        **keywords(here, accept_lens=ints(2, 1, 0)),
    )
    check_post(state)
    assert counter == [2, 1, 0]


@row("sglang-jax", "`accept_len_draft`")
def test_accepted_drafts_lack_the_bonus_token(here: str) -> None:
    state, counter = post(**keywords(here, accept_len_draft=ints(1, 0)))
    check_post(state)
    assert counter == [2, 1]


@row("sglang-jax", "`copy_slots`")
def test_copy_slots_copies_nothing_from_slot_0(here: str) -> None:
    slots = keywords(here, src_indices=ints(3, 0, 5), dst_indices=ints(4, 2, 6))
    state = copy_mamba_blocks(pools(), **slots, conv_layout="DS")
    check(state, {4: [30, 31, 32], 6: [50, 51, 52]}, {4: 3, 6: 5})


@row("sglang-jax", "`conv_buffers`")
def test_conv_buffers_of_sglang_jax_are_ds(here: str) -> None:
    # Slots of three channels, two tokens, in the list of a layer.
    buffers = [ints([[0, 0], [0, 0], [0, 0]], [[1, 2], [3, 4], [5, 6]], [[7, 8], [7, 8], [7, 8]])]
    state = MambaState(conv=tuple(buffers))
    state = copy_mamba_blocks(state, ints(1), ints(2), ints(1), **keywords(here))
    assert state.conv[0].tolist() == [[[0, 0]] * 3, [[1, 2], [3, 4], [5, 6]], [[2, 8], [4, 8], [6, 8]]]


@row("MaxText", "`cached_prefill_value`")
def test_conv_states_of_maxtext_are_sd(here: str) -> None:
    cached_prefill_value = ints([[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [7, 8, 9]])
    state = MambaState(conv=cached_prefill_value)
    state = copy_mamba_blocks(state, ints(0), ints(1), ints(1), null_block_id=None, **keywords(here))
    assert state.conv.tolist() == [[[1, 2, 3], [4, 5, 6]], [[4, 5, 6], [7, 8, 9]]]


@row("MaxText", "`slots`")
def test_slot_0_of_maxtext_is_a_real_one(here: str) -> None:
    state = copy_mamba_blocks(pools("SD"), ints(5, 5), **keywords(here, slots=[0, 2]), conv_layout="SD")
    check(state, {0: [50, 51, 52], 2: [50, 51, 52]}, {0: 5, 2: 5})


def test_every_row_of_the_table_has_a_test() -> None:
    section = README.split("## Calling it from your engine")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(TABLE) == len(lines) - 1  # without its head
    assert tested == TABLE.keys()


BLOCK_SIZE = 4


def readme_step() -> Callable[..., Any]:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(list(filter(None, example.splitlines()))) <= 25
    variables: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), variables)
    return variables["step"]


def decode(token: int, count: int) -> list[int]:
    """The toy model, one token at a time: the token and the ones that it samples after it."""
    tokens = [0, 0, token]
    for seen in range(1, count):
        tokens.append((seen + 7 * tokens[-3] + 3 * tokens[-2] + tokens[-1]) % 10)
    return tokens[2:]


class Server:
    """Two new requests that the README's step serves. From step to step one draft more is right, then none again."""

    def __init__(self, drafts: int) -> None:
        self.step, self.drafts = readme_step(), drafts
        self.tables = ints([*range(1, 17)], [*range(32, 16, -1)])
        self.states = [MambaState(conv=jnp.zeros((50, 1, 2 + drafts), jnp.int32), temporal=jnp.zeros(50, jnp.int32))]
        self.idx, self.counter, self.computed = ints(-1, -1), ints(1, 1), ints(0, 0)

    def run(self, truth: list[list[int]], got: list[list[int]], steps: int) -> list[list[int]]:
        """Decodes on from `got`; returns how many tokens each step accepted."""
        history = []
        for number in range(steps):
            windows = []
            for row, (right, tokens) in enumerate(zip(truth, got, strict=True)):
                drafts = right[len(tokens) : len(tokens) + self.drafts]
                good = (number + row) % (self.drafts + 1)
                drafts[good:] = [(draft + 1) % 10 for draft in drafts[good:]]
                windows.append([tokens[-1], *drafts])
            old = self.states
            self.states, self.idx, self.counter, self.computed, sampled, accepted = self.step(
                old, self.idx, self.counter, self.computed, ints(*windows), self.tables
            )
            assert old[0].conv.is_deleted()
            assert old[0].temporal.is_deleted()
            history.append(accepted.tolist())
            for row, tokens in enumerate(got):
                tokens += sampled[row, : history[-1][row]].tolist()
                self.check_finished_blocks(row, [0, *truth[row]])
        return history

    def check_finished_blocks(self, row: int, tokens: list[int]) -> None:
        """Every finished block holds the state at its boundary, after every step."""
        for column in range(int(self.computed[row]) // BLOCK_SIZE):
            block, boundary = int(self.tables[row, column]), (column + 1) * BLOCK_SIZE
            assert self.states[0].temporal[block] == boundary
            assert self.states[0].conv[block, 0, :2].tolist() == tokens[boundary - 1 : boundary + 1]


@pytest.mark.parametrize(
    ("drafts", "first_accepted", "computed"),
    [
        (0, [[1, 1], [1, 1]], [18, 18]),
        (1, [[1, 2], [2, 1], [1, 2]], [27, 27]),
        (2, [[1, 2], [2, 3], [3, 1], [1, 2]], [36, 36]),
        (3, [[1, 2], [2, 3], [3, 4], [4, 1]], [43, 45]),
    ],
)
def test_the_step_decodes_as_one_token_at_a_time_does(
    drafts: int, first_accepted: list[list[int]], computed: list[int]
) -> None:
    server = Server(drafts)
    truth = [decode(1, 60), decode(7, 60)]
    assert truth[0][:10] == [1, 2, 7, 3, 2, 5, 8, 4, 1, 8]
    got = [[1], [7]]
    accepted = server.run(truth, got, 18)
    assert accepted[: len(first_accepted)] == first_accepted
    assert server.computed.tolist() == computed
    assert got == [truth[0][: computed[0] + 1], truth[1][: computed[1] + 1]]


def test_a_new_request_begins_where_a_finished_block_ends() -> None:
    server = Server(drafts=2)
    truth = [decode(1, 60), decode(7, 60)]
    got = [[1], [7]]
    server.run(truth, got, 9)
    # Slot 1 is given to a request whose first eight tokens are those of slot 0: it shares the blocks 1 and 2.
    server.tables = ints([*range(1, 17)], [1, 2, *range(33, 47)])
    server.idx = server.idx.at[1].set((8 - 1) // BLOCK_SIZE)
    server.counter = server.counter.at[1].set(1)
    server.computed = server.computed.at[1].set(8)
    truth[1], got[1] = truth[0], truth[0][:9]
    server.run(truth, got, 9)
    assert got == [truth[0][:37], truth[0][:27]]
