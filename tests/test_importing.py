import gc

import pytest

from hf_tpu_ext.importing import without_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before_after_an_error(enabled, request):
    request.addfinalizer(gc.enable)
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ImportError), without_garbage_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() is enabled
