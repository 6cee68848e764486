"""Pages that show a run or compare several: one HTML file each, without a network and other files."""
