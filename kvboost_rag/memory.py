"""Memory of ended requests, kept for the next: fresh pages cost more than writing what goes into them.

The system gives memory page by page, zeroed, at the first touch. For the KV of a prompt that is three times as long as
writing it, and as much as a tenth of the time to the first token.
"""

from __future__ import annotations

import math
import weakref
from collections import deque

import torch

SMALLEST_BYTES = 1 << 20  # below, the allocator of the C library keeps memory by itself
LARGEST_BYTES = 96 << 20
KEPT_BLOCKS = 4  # keys and values of two requests


class Memory:
    """Hands out tensors, and keeps the memory of those that are gone for the next ones. Thread-safe.

    Memory comes back only when no tensor, and no view of one, lies in it any more. Only for the CPU: torch keeps the
    memory of other devices itself. The last blocks that came back are kept; older ones go back to the system.
    """

    def __init__(self) -> None:
        # Appended to by finalizers, which may run anywhere, also in the middle of the methods below: so no lock.
        self._free: deque[torch.Tensor] = deque(maxlen=KEPT_BLOCKS)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Like `torch.empty`; what it holds may be of an earlier tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not SMALLEST_BYTES <= nbytes <= LARGEST_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        block = self._fitting(nbytes)
        # An array of its own for each tensor: torch's storage keeps it alive as long as any view of the tensor lives.
        lease = block.numpy()[:nbytes]
        weakref.finalize(lease, self._free.append, block).atexit = False
        return torch.from_numpy(lease).view(dtype).view(shape)

    def _fitting(self, nbytes: int) -> torch.Tensor:
        """A block of at least so many bytes and at most twice as many: a free one, or a new one."""
        others = []
        try:
            while True:
                block = self._free.pop()  # the latest is the likeliest to fit, and to lie in a cache
                if nbytes <= block.nbytes <= 2 * nbytes:
                    return block
                others.append(block)
        except IndexError:
            return torch.empty(nbytes, dtype=torch.uint8)
        finally:
            self._free.extendleft(others)


MEMORY = Memory()
