"""Components that record what are no single numbers: texts and histograms."""
