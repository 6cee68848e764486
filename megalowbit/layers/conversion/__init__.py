"""Linear layers out, BitLinear in, and back: which layers a recipe converts, and what is refused."""
