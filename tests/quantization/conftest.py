import pytest


@pytest.fixture(scope="session", autouse=True)
def started(xla):
    """XLA is started before the first backward pass of the process."""
