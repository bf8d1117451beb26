import pytest

from hf_tpu_ext.backends.cpu import CPUBackend


@pytest.fixture(params=["cpu", "xla"])
def backend(request, xla):
    """Each of the two backends that this machine has. The CPU's runs eagerly what the other one compiles."""
    return xla if request.param == "xla" else CPUBackend("for the test")
