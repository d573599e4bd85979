"""Block pool, prefix keys and drafters, by hand-typed cases."""

import pytest

from pallas_kernels.serving import BlockPool, NgramDrafter, ScriptedDrafter, block_keys


def test_keys_are_a_chain_over_complete_blocks() -> None:
    keys = block_keys([1, 2, 3, 4, 5, 6, 7], 3)
    assert len(keys) == 2
    assert keys == block_keys([1, 2, 3, 4, 5, 6, 9], 3)
    assert block_keys([1, 2, 9, 4, 5, 6], 3)[1] != keys[1], "the second key covers the first block too"
    assert block_keys([1, 2, 3, 9, 5, 6], 3)[0] == keys[0]
    assert block_keys([1, 2, 3, 4, 5, 6, 7], 3, known=keys[:1]) == keys
    assert block_keys([1, 2], 3) == []


def test_pool_hands_out_every_block_but_the_null_block_once() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, None]
    pool.release(2)
    assert pool.allocate() == 2


def test_longest_published_prefix_is_shared() -> None:
    pool = BlockPool(8)
    first, third = pool.allocate(), pool.allocate()
    pool.publish(first, b"a")
    pool.publish(third, b"c")
    assert pool.share([b"a", b"b"]) == (0, first)
    assert pool.share([b"a", b"b", b"c", b"d"]) == (2, third)
    assert pool.share([b"x"]) is None


def test_shared_block_survives_until_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"a")
    pool.share([b"a"])
    pool.release(block)
    assert pool.allocate() is None
    pool.release(block)
    assert pool.allocate() == block
    assert pool.share([b"a"]) is None, "an evicted block is not found"
    assert pool.num_evictions == 1


def test_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
        pool.release(block)
    _, used = pool.share([b"a"])
    pool.release(used)
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_free_blocks_go_before_published_ones() -> None:
    pool = BlockPool(3)
    published, free = pool.allocate(), pool.allocate()
    pool.publish(published, b"a")
    pool.release(published)
    pool.release(free)
    assert pool.num_available == 2
    assert pool.allocate() == free
    assert pool.share([b"a"]) == (0, published)


def test_second_block_of_a_key_stays_private() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.release(second)
    assert pool.share([b"a"]) == (0, first)
    assert pool.allocate() == second


@pytest.mark.parametrize(
    ("tokens", "limit", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 3], 1, [9]),
        ([7, 3, 5, 6, 3, 8, 4, 3], 2, [8, 4]),  # one token matches; the most recent time counts
        ([2, 3, 1, 3, 2, 2, 3], 2, [1, 3]),  # two tokens match, though one matches later
        ([4, 4, 4], 3, [4]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_prompt_lookup(tokens: list[int], limit: int, drafts: list[int]) -> None:
    assert NgramDrafter(longest=3).draft(0, tokens, limit) == drafts


def test_scripted_drafts_are_right_and_then_wrong() -> None:
    drafter = ScriptedDrafter({5: [1, 2, 3, 4, 5, 9]}, [(2, 1), (0, 2)], vocab_size=10)
    assert drafter.draft(5, [1, 2], 3) == [3, 4, 6]
    assert drafter.draft(5, [1, 2, 3], 3) == [5, 6]
    assert drafter.draft(5, [1, 2], 1) == [3]
    assert drafter.draft(5, [1, 2, 3, 4, 5], 3) == [0]
