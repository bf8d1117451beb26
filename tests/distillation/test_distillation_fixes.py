"""What a teacher and its cache refuse is accepted once it is changed as the message says."""

import shutil

from cache_driver import make_writer
from fixes import refusal


def test_files_that_a_process_of_another_machine_has_written_elsewhere(make_cache, tiny_teacher, rows, tmp_path):
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "cache"
    told = make_cache(elsewhere).shards
    _, writer = make_writer(directory, tiny_teacher, rows)
    writer._shards = dict(enumerate(told))
    message = refusal(writer.finish, {})
    assert message.startswith(f"{directory / told[0].file} is missing. ")
    assert "give one that all of them see, --output_dir DIR" in message
    for shard in told:
        shutil.copy(elsewhere / shard.file, directory)
    assert writer.finish().shards == told
