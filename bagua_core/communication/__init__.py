"""The collectives of one generation, buckets, and the reducer that drives them."""
