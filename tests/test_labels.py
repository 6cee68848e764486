import torch

from megalowbit.labels import IGNORED_LABEL, count_labels


def test_the_ignored_label_is_that_of_torch_and_the_first_token_is_no_label():
    logits = torch.zeros(2, 7)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([3, IGNORED_LABEL]), reduction="sum")
    torch.testing.assert_close(loss, torch.tensor(7.0).log())  # processors differ in the last bit
    labels = torch.tensor([[5, 6, IGNORED_LABEL, 7], [IGNORED_LABEL, 1, 2, 3], [4, *[IGNORED_LABEL] * 3]])
    assert count_labels(labels).tolist() == [2, 3, 0]
