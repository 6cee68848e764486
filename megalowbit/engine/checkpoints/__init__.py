"""An engine's checkpoints: written atomically, verified, loadable at another ZeRO stage or rank count."""
