"""Linear layers of which every tensor-parallel rank holds a shard."""
