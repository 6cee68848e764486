"""Conversion of linear layers to BitLinear and back, and which layers a recipe converts, keeps or rejects."""
