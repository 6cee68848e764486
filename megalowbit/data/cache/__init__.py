"""What takes long to compute: built once, kept in `data.cache_dir`, and checked before each use."""
