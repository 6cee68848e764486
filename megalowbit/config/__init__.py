"""Reads and checks a DeepSpeed JSON file and its `"megalowbit"` block, without torch or DeepSpeed."""
