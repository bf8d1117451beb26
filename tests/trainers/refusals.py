"""What a refusal has to say."""

import pytest


def refused(words, call):
    """The message holds what a user has to know, and what to type."""
    with pytest.raises(ValueError) as error:
        call()
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
