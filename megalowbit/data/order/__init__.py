"""The order of samples: a permutation within each source, and which source gives each sample of a blend."""
