"""torch's current GPU without a GPU."""

import torch


def simulate_current_gpu(monkeypatch):
    """Let `torch.cuda.device` change what `torch.cuda.current_device` returns; GPU 0 is current.

    Returns:
        Indices of the GPUs that are entered; the last one is current.
    """
    current = [0]

    class Entered:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Entered)
    return current
