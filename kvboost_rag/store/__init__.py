"""Where chunks live: tiers behind one small interface."""

from ..stats import DiskStats
from .catalogue import Row
from .codec import Codec, KVShape, codec_for, codec_of
from .disk import DiskStore
from .eviction import LRU, Entry, Policy
from .memory import MemoryStore, Reservation
from .reading import DiskReader
from .tier import Chunk, StoreStats, Tier
from .tiered import Kept, TieredStore
from .upkeep import StoreView, collect, rebuild, verify

__all__ = [
    "LRU",
    "Chunk",
    "Codec",
    "DiskReader",
    "DiskStats",
    "DiskStore",
    "Entry",
    "KVShape",
    "Kept",
    "MemoryStore",
    "Policy",
    "Reservation",
    "Row",
    "StoreStats",
    "StoreView",
    "Tier",
    "TieredStore",
    "codec_for",
    "codec_of",
    "collect",
    "rebuild",
    "verify",
]
