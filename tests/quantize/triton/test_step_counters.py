import torch

from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton import launch_arguments as job


def test_the_keys_of_a_stream_share_a_counter_that_holds_the_micro_batch():
    stream, cpu = RandomStream(1, 0), torch.device("cpu")
    seen = []
    for _ in range(3):
        stream.advance()
        one, other = (job.random_arguments(stream.key(name, "input"), cpu) for name in "ab")
        assert one["step"] is other["step"]
        assert one["key_low"] != other["key_low"]
        assert (one["step"].tolist(), one["lag"]) == ([stream.step, 0], 0)
        seen.append({**one, "step": one["step"].data_ptr()})
    assert seen[0] == seen[1] == seen[2]
    late = job.random_arguments(stream.key("a", "input", step=1), cpu)
    assert late["step"][0].item() - late["lag"] == 1
    with stream.at(2):
        again = job.random_arguments(stream.key("a", "input"), cpu)
    assert again["step"][0].item() - again["lag"] == 2
    stream.load_state_dict({"seed": 1, "step": 0})
    first = job.random_arguments(stream.key("a", "input"), cpu)
    assert first["step"][0].item() - first["lag"] == 0
