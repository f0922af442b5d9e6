"""Where chunks live: tiers behind one small interface."""

from .eviction import LRU, Entry, Policy
from .memory import MemoryStore, Reservation
from .tier import Chunk, StoreStats, Tier

__all__ = ["LRU", "Chunk", "Entry", "MemoryStore", "Policy", "Reservation", "StoreStats", "Tier"]
