"""Transformers on borrowed memory: a cache that holds more than the device has room for."""

from __future__ import annotations

from aqualib.engines.transformers.cache import AquaCache, CacheStatistics

__all__ = ["AquaCache", "CacheStatistics"]
