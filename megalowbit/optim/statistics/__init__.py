"""What is measured of gradients while backward makes them, and factors by block."""
