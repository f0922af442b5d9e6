"""Memory of ended requests serves the next, and never while anybody can still see it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvboost_rag.memory import KEPT_BLOCKS, LARGEST_BYTES, SMALLEST_BYTES, Memory

CPU = torch.device("cpu")
SHAPE = (2, 3, 4096, 64)  # 6 MiB of float32


def test_what_is_gone_is_handed_out_again_also_in_another_shape() -> None:
    memory = Memory()
    first = memory.empty(SHAPE, torch.float32, CPU)
    place = first.data_ptr()
    del first
    second = memory.empty((4096, 700), torch.bfloat16, CPU)
    assert second.data_ptr() == place
    assert (second.shape, second.dtype) == ((4096, 700), torch.bfloat16)
    assert second.is_contiguous()
    second.fill_(1.0)
    assert float(second.sum(dtype=torch.float64)) == second.numel()


@pytest.mark.parametrize("kept", ["view", "numpy", "storage"])
def test_memory_that_can_still_be_seen_is_never_handed_out(kept: str) -> None:
    memory = Memory()
    tensor = memory.empty(SHAPE, torch.float32, CPU).fill_(3.0)
    seen = {"view": tensor[1, :, 5:9], "numpy": tensor[0].numpy(), "storage": tensor.untyped_storage()}[kept]
    del tensor
    gc.collect()
    for _ in range(KEPT_BLOCKS + 1):
        memory.empty(SHAPE, torch.float32, CPU).fill_(7.0)
    if kept == "storage":
        seen = torch.empty(0).set_(seen)
    assert float(seen.max()) == float(seen.min()) == 3.0


def test_only_the_last_blocks_are_kept_and_none_that_is_small_or_large() -> None:
    memory = Memory()
    tensors = [memory.empty(SHAPE, torch.float32, CPU) for _ in range(KEPT_BLOCKS + 3)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    tensors += [memory.empty((size,), torch.uint8, CPU) for size in (SMALLEST_BYTES - 1, LARGEST_BYTES + 1, 0)]
    del tensors
    assert len(memory._free) == KEPT_BLOCKS
    assert {block.nbytes for block in memory._free} == {4 * 2 * 3 * 4096 * 64}


def test_a_block_that_is_much_too_large_is_left_for_others() -> None:
    memory = Memory()
    large = memory.empty((64 << 20,), torch.uint8, CPU)
    place = large.data_ptr()
    del large
    small = memory.empty((2 << 20,), torch.uint8, CPU)
    assert small.data_ptr() != place
    assert memory.empty((40 << 20,), torch.uint8, CPU).data_ptr() == place


def test_threads_never_get_the_same_memory() -> None:
    memory = Memory()

    def work(number: int) -> bool:
        for _ in range(60):
            mine = memory.empty((1 << 20,), torch.uint8, CPU).fill_(number)
            if not bool((mine == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
