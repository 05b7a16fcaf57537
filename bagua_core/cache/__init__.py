"""The cache of samples behind CachedDataset and CacheLoader: each value is computed once and then read back.

Values become bytes without pickle (`frames`), lie in this node's shared memory
(`lmdb_store`) or in Redis (`redis_store`), and are written in the background (`write_behind`).
Invariant: a sample is always what the data set gave; a fault of the cache costs time only.
"""
