import pytest

from megalowbit.errors import UserError, unknown_name


def test_unknown_name_names_the_value_the_nearest_and_all_known():
    error = unknown_name("recipe", "nvpf4", ["bf16", "nvfp4"])
    assert str(error) == "unknown recipe 'nvpf4': did you mean 'nvfp4'? known: bf16, nvfp4"


def test_unknown_name_makes_no_wild_guess():
    assert "did you mean" not in str(unknown_name("recipe", "zzz", ["bf16", "nvfp4"]))


def test_a_user_error_is_a_value_error():
    with pytest.raises(ValueError, match="block_size"):
        raise UserError("block_size must be positive, not 0")
