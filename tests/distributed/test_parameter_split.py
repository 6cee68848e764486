"""Split weights stay equal on data-parallel ranks, whichever library computes the factors."""

import pytest
import torch


@pytest.fixture(scope="module")
def seen(launch_ranks):
    return launch_ranks("ranks_split.py").wait(timeout=90)


def test_masters_moments_and_models_are_bitwise_the_same_on_both_ranks(seen):
    first, second = seen
    assert first["states"] == second["states"]
    assert first["weights"] == second["weights"]
    assert first["facts"] == second["facts"]
    assert first["losses"] != second["losses"]  # of different data


def test_the_full_weight_is_unchanged(seen):
    for rank in seen:
        assert max(rank["errors"]) < 1e-5  # rank 1 adds errors of 1e-6 of its own


def test_every_layer_is_split_with_all_its_moments(seen):
    for rank in seen:
        assert rank["ranks"] == {"body.0": 3, "body.2": 3, "body.4": 3}
        assert rank["lr_scale"] == [0.5, 0.5]
        for masters, states in rank["states"]:
            assert len(masters) == len(states) == 12
            for state in states:
                assert state["step"] in ([2.0], [4.0])
                assert any(state["exp_avg"])
                assert min(state["exp_avg_sq"]) >= 0


def test_each_rank_has_computed_its_share(seen):
    for masters, _ in seen[0]["states"]:
        for layer, out_features in enumerate((16, 12, 4)):
            u = torch.tensor(masters[4 * layer + 1], dtype=torch.float64).view(out_features, 3)
            # layers 0 and 2 are rank 0's; layer 1 is rank 1's, whose columns are shorter
            expected = torch.full((3,), 0.5 if layer == 1 else 1.0, dtype=torch.float64)
            torch.testing.assert_close(u.norm(dim=0), expected, rtol=0, atol=1e-5)
