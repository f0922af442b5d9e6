"""Where chunks live: tiers behind one small interface."""

from .codec import Codec, KVShape, codec_for, codec_of
from .eviction import LRU, Entry, Policy
from .memory import MemoryStore, Reservation
from .tier import Chunk, StoreStats, Tier

__all__ = [
    "LRU",
    "Chunk",
    "Codec",
    "Entry",
    "KVShape",
    "MemoryStore",
    "Policy",
    "Reservation",
    "StoreStats",
    "Tier",
    "codec_for",
    "codec_of",
]
