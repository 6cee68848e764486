import pytest
import torch

from megalowbit.engine.pipeline.micro_batches import BatchLimits, as_inputs_and_labels, check_values, mask_of
from megalowbit.errors import UserError

TOKENS = torch.arange(20).reshape(2, 10) * 7 % 50
MASK = torch.ones_like(TOKENS).index_fill(1, torch.tensor([0, 1]), 0)
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)
WHOLE = {"input_ids": TOKENS, "labels": TOKENS}


def test_batches_may_be_mappings_or_pairs():
    inputs, labels = as_inputs_and_labels({**WHOLE, "attention_mask": None})
    assert inputs is TOKENS
    assert labels is TOKENS
    inputs, _ = as_inputs_and_labels({**WHOLE, "attention_mask": MASK.bool()})
    assert inputs[1].dtype == torch.int64
    for pair in (((TOKENS, MASK, POSITIONS), TOKENS), [[TOKENS, MASK, POSITIONS], TOKENS]):
        inputs, labels = as_inputs_and_labels(pair)
        assert [each.tolist() for each in inputs] == [TOKENS.tolist(), MASK.tolist(), POSITIONS.tolist()]
        assert labels is TOKENS


def test_a_missing_mask_stays_missing():
    inputs, _ = as_inputs_and_labels({**WHOLE, "position_ids": POSITIONS})
    assert mask_of(list(inputs[1:]), 10) is None
    assert inputs[2].equal(POSITIONS)
    assert mask_of([], 10) is None
    assert mask_of([MASK], 10) is MASK


def test_any_non_zero_mask_value_means_attend():
    inputs, _ = as_inputs_and_labels({**WHOLE, "attention_mask": MASK * 0.5})
    assert inputs[1].equal(MASK)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"input_ids": TOKENS}, "no 'labels', only input_ids: add it"),
        ({"labels": TOKENS}, "no 'input_ids'"),
        ({**WHOLE, "labels": None}, "no 'labels'"),
        ({**WHOLE, "token_type_ids": TOKENS}, "'token_type_ids', which no stage takes"),
        ({**WHOLE, "inputs_embeds": TOKENS}, "'inputs_embeds', which no stage takes"),
        ({**WHOLE, "num_items_in_batch": 3}, "'num_items_in_batch', which no stage takes"),
        ({**WHOLE, "attention_mask": torch.ones(2, 1, 10, 10)}, r"attention_mask of shape \(2, 1, 10, 10\)"),
        ({**WHOLE, "attention_mask": MASK[:, :1]}, r"attention_mask of shape \(2, 1\)"),
        ({**WHOLE, "position_ids": POSITIONS[0]}, r"position_ids of shape \(10,\)"),
        ({**WHOLE, "labels": TOKENS[:, 1:]}, r"labels of shape \(2, 9\)"),
        ({**WHOLE, "labels": [1, 2]}, r"labels = \[1, 2\]: make it a tensor"),
        ({**WHOLE, "input_ids": TOKENS.float()}, "input_ids of type torch.float32"),
        ({"input_ids": TOKENS[0], "labels": TOKENS[0]}, r"input_ids of shape \(10,\)"),
        (((TOKENS, MASK, POSITIONS, TOKENS), TOKENS), "4 inputs"),
        (((TOKENS, MASK[None]), TOKENS), "attention_mask of shape"),
        (TOKENS, "neither a mapping nor"),
    ],
)
def test_a_batch_that_stages_do_not_support_is_rejected(batch, named):
    with pytest.raises(UserError, match=named) as error:
        as_inputs_and_labels(batch)
    assert "\n" not in str(error.value)


LIMITS = BatchLimits(vocabulary=50, positions=10)


@pytest.mark.parametrize(
    ("inputs", "labels", "named"),
    [
        (
            TOKENS.clone().fill_(50),
            TOKENS,
            "50 in input_ids, which is not in the vocabulary: it must be 0 … 49",
        ),
        (TOKENS - 1, TOKENS, "-1 in input_ids"),
        (TOKENS, TOKENS - 99, "-99 in labels"),
        ((TOKENS, MASK, POSITIONS + 3), TOKENS, "10 in position_ids"),
        (torch.zeros(2, 11, dtype=torch.long), TOKENS, "11 tokens in a sequence, but the model has 10 pos"),
    ],
)
def test_tokens_and_positions_outside_the_embeddings_are_rejected(inputs, labels, named):
    with pytest.raises(UserError, match=named):
        check_values(inputs, labels, LIMITS)


def test_tokens_and_positions_within_the_embeddings_pass():
    long = torch.zeros(2, 11, dtype=torch.long)
    for inputs, labels, limits in (
        (TOKENS, TOKENS.masked_fill(MASK == 0, -100), LIMITS),
        ((TOKENS, MASK, POSITIONS), TOKENS, LIMITS),
        ((long, long, long), long, LIMITS),
        (long, long, BatchLimits(vocabulary=1, positions=None)),
    ):
        assert check_values(inputs, labels, limits) is None
