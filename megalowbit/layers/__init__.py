"""Linear layers whose three GEMMs run on low-precision operands, their recipes, and model conversion."""
