"""Copies of batches: to which devices they go in the background. Bounds are in `test_flash_attention.py`."""

import pytest
import torch

from megalowbit.hf.batches.upload import copies_in_background, upload


def test_only_gpus_get_batches_from_pinned_memory():
    assert not copies_in_background(torch.device("cpu"))
    assert not copies_in_background(torch.device("meta"))
    assert copies_in_background(torch.device("cuda", 1))
    batch = {"input_ids": torch.arange(64).view(2, -1), "position_ids": torch.arange(32).expand(2, -1)}
    found = upload(batch, torch.device("cpu"))
    assert found.keys() == batch.keys()
    assert all(found[name] is each for name, each in batch.items())  # no copy on CPUs


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_copy_of_a_batch():
    device = torch.device("cuda", torch.cuda.current_device())
    batch = {"input_ids": torch.arange(2**20).view(8, -1), "labels": torch.arange(2**20).view(8, -1) + 1}
    expected = {name: each.clone() for name, each in batch.items()}
    upload(batch, device)  # allocates
    torch.cuda.synchronize()
    torch.cuda._sleep(2**31)  # work before the copies: about a second
    busy = torch.cuda.Event()
    busy.record()
    found = upload(batch, device)
    assert not busy.query()  # the host came here before the device had done the earlier work
    for each in batch.values():
        each.zero_()  # the loader may use its memory again: pinned memory is a copy
    torch.cuda.synchronize()
    for name, each in found.items():
        assert each.device == device
        assert each.cpu().equal(expected[name])


@pytest.mark.gpu
def test_a_copy_to_a_gpu_makes_no_synchronisation():
    device = torch.device("cuda", torch.cuda.current_device())
    batch = {"input_ids": torch.arange(64).view(2, -1)}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = upload(batch, device)
        with pytest.raises(RuntimeError, match="synchroniz"):
            batch["input_ids"].to(device)  # from memory that is not pinned
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found["input_ids"].cpu().equal(batch["input_ids"])
