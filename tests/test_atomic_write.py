"""A file that is whole or not there."""

import pytest

from hf_tpu_ext.atomic_write import write_atomically


def test_nothing_is_left_of_what_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"
