"""DeepSpeed's ZeRO optimizers with our loss scale, gradient measurement and step report."""
