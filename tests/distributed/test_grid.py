"""A grid of 2 × 2 processes: the position of each, and a model that shards itself over two of them."""

import math

import pytest
import torch

WORLD, DATA, STEPS, ACCUMULATION = 4, 2, 4, 2
LEARNING_RATE, DECAY, CLIP = 1e-2, 0.01, 0.5


@pytest.fixture(scope="module")
def seen(launch_ranks):
    """What the four ranks of ranks_grid.py reported; launched once for all tests of this file."""
    return launch_ranks("ranks_grid.py", world_size=WORLD).wait(timeout=180)


@pytest.mark.parametrize("kind", [pytest.param("autotp", marks=pytest.mark.slow), "pipeline", "megatron"])
def test_the_grid_arithmetic_gives_the_ranks_of_real_groups(seen, kind):
    for rank in seen:
        theirs, ours = rank[kind]
        assert ours == theirs


def test_tensor_ranks_are_neighbours_and_stages_outermost(seen):
    assert [rank["autotp"][1]["tensor"] for rank in seen] == [[0, 0], [1, 0], [0, 2], [1, 2]]
    assert [rank["autotp"][1]["data"][0] for rank in seen] == [0, 0, 1, 1]
    assert [rank["pipeline"][1]["stages"] for rank in seen] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [rank["pipeline"][1]["data"][0] for rank in seen] == [0, 1, 0, 1]


def reference(tiny):
    """The same training in one process, in float64, with AdamW and clipping written out."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(tiny.HIDDEN, tiny.HIDDEN),
        torch.nn.Linear(tiny.HIDDEN, tiny.WIDTH, bias=False),
        torch.nn.Tanh(),
        torch.nn.Linear(tiny.WIDTH, 1),
    ).double()
    weights = list(model.parameters())
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    losses, norms = [[[] for _ in range(STEPS)] for _ in range(DATA)], []
    for step in range(STEPS):
        for rank in range(DATA):
            for micro_batch in range(ACCUMULATION):
                x = tiny.data(step, micro_batch, rank, DATA).double()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                losses[rank][step].append(loss.item())
                (loss / (DATA * ACCUMULATION)).backward()
        norm = math.sqrt(sum(float(w.grad.square().sum()) for w in weights))
        norms.append(norm)
        for index, w in enumerate(weights):
            gradient = w.grad * min(1.0, CLIP / (norm + 1e-6))
            m[index] = 0.9 * m[index] + 0.1 * gradient
            v[index] = 0.999 * v[index] + 0.001 * gradient.square()
            denominator = (v[index] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            with torch.no_grad():
                w *= 1 - LEARNING_RATE * (DECAY if w.ndim > 1 else 0.0)
                w -= LEARNING_RATE * m[index] / (1 - 0.9 ** (step + 1)) / denominator
            w.grad = None
    return losses, norms


@pytest.mark.parametrize("case", ["fp32", "zero1"])
def test_a_megatron_style_model_trains_as_the_full_one_in_one_process(seen, tiny, case):
    losses, norms = reference(tiny)
    assert max(norms) > CLIP, "clipping must be at work for its norm to matter"
    for index, rank in enumerate(seen):
        expected = losses[index // 2]
        for step, facts in enumerate(rank[case]):
            assert facts["losses"] == pytest.approx(expected[step], rel=1e-5)
            assert facts["norm"] == pytest.approx(norms[step], rel=1e-5), "every part counts exactly once"


def test_replicated_weights_stay_equal_on_tensor_ranks(seen):
    for case in ("fp32", "zero1", "overflow"):
        assert len({str([step["replicated"] for step in rank[case]]) for rank in seen}) == 1


def test_an_overflow_on_one_tensor_rank_skips_the_step_on_all(seen):
    for rank in seen:
        assert [step["skipped"] for step in rank["overflow"]] == [0, 1, 1, 1]
        assert [step["scale"] for step in rank["overflow"]] == [1024, 512, 512, 512]
        assert [step["norm"] is None for step in rank["overflow"]] == [False, True, False, False]
        before, after = (rank["overflow"][step]["replicated"] for step in (0, 1))
        assert before == after


def test_shards_without_a_sharding_are_neither_resharded_nor_exported(seen):
    for rank in seen:
        case = rank["checkpoints"]["marked"]
        assert case["0"] == [{}, True]
        line, is_loaded = case["1"]
        assert not is_loaded
        assert (
            "parameter column is marked tensor_model_parallel but has no .sharding, so its 2 shards" in line
        )
        assert line == seen[0]["checkpoints"]["marked"]["1"][0]
        for name in ("column", "row"):
            assert f"parameter {name} is marked tensor_model_parallel" in case["shapes"][name]
        assert case["shapes"]["bias"] == [1]


def test_shards_with_a_sharding_are_resharded_and_joined(seen, tiny):
    for rank in seen:
        assert rank["checkpoints"]["cut"] == {
            "shapes": {"column": [tiny.WIDTH, tiny.HIDDEN], "row": [1, tiny.WIDTH], "bias": [1]},
            "0": [{}, True],
            "1": [{}, True],
        }


SAID = {
    "no_data": "mpu has no get_data_parallel_group(): initialise",
    "not_made": "mpu has no get_data_parallel_group(): initialise",
    "no_group": "rank 0: mpu.get_model_parallel_group() is not a process group of rank 0: return the",
    "not_mine": "rank 0: mpu.get_data_parallel_group() is not a process group of rank 0: return the",
    "does_not_multiply": "mpu's groups do not fit together: data 1 × tensor 2 × pipeline 1 = 2 processes",
    "strided": "rank 0: mpu's data-parallel group of rank 0 has ranks [0, 1], not [0, 2]: use Megatron",
    "overlap": "rank 0: mpu's data-parallel group of rank 0 has ranks [0, 1], not [0, 2]: use Megatron",
    "wrong_rank": "rank 0: mpu.get_data_parallel_rank() = 5 on rank 0, but its group gives 0: return",
    "context": "mpu.get_context_parallel_world_size() = 2: context parallelism is not supported, set it to 1",
    "sequence": "mpu is one of sequence parallelism, which is not supported: leave it out",
    "twice": "mpu and the configuration (2 × 2: data 2, tensor 2) both partition the model: leave one",
}


@pytest.mark.parametrize("case", SAID)
def test_an_mpu_that_does_not_fit_is_refused_on_every_rank(seen, case):
    lines = {rank["refusals"][case] for rank in seen}
    assert len(lines) == 1
    assert lines.pop().startswith(SAID[case])
