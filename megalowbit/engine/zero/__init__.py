"""DeepSpeed's ZeRO optimizers with our loss scale, our inspection of gradients and our report."""
