"""What a teacher and its cache refuse is accepted once it is changed as the message says."""

import shutil

from cache_driver import make_writer
from fixes import assert_fixes, refusal
from transformers import BigBirdConfig, BigBirdForMaskedLM, LlamaConfig, LlamaForCausalLM

from hf_tpu_ext.distillation.teachers import check_answers_alone


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


def test_a_teacher_whose_frequencies_depend_on_the_batch():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    teacher = LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, rope_parameters=rope, **SIZES))
    # Rows are cut to it.
    check = lambda max_length: check_answers_alone(teacher, max_length, "teacher")  # noqa: E731
    assert_fixes(check, {"max_length": 40}, "Set max_length=16")


def test_a_teacher_whose_attention_depends_on_the_batch():
    config = BigBirdConfig(block_size=4, num_random_blocks=1, num_attention_heads=4, **SIZES)

    def check(attention_type):
        config.attention_type = attention_type
        check_answers_alone(BigBirdForMaskedLM(config), 40, "teacher")

    message = refusal(check, {"attention_type": "block_sparse"})
    assert 'Set "attention_type": "original_full" in the teacher\'s config.json' in message
    check("original_full")


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
