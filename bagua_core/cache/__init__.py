"""What was computed once for a sample and how to have it again: the cache behind CachedDataset and CacheLoader.

Values become bytes without pickle (`layout`, `encoding`, `decoding`), lie in this node's shared memory
(`embedded_store`) or in Redis (`redis_store`), and are written behind the training's back (`write_behind`).
Invariant: whatever happens to the cache, a sample is what the data set gave; a fault costs time.
"""
