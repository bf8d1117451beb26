"""Commands besides training, in an environment with torch_tpu."""


def test_an_adapter_trained_there_is_exported_and_reported(hf_tpu, tmp_path):
    hf_tpu("prepare", "tiny", "--output_dir", "tiny")
    hf_tpu("sft", "--smoke", "tiny", "--use_peft", "true", "--output_dir", "out")
    exported = hf_tpu("export", "out", "--merge")
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file(), exported.stdout
    page = (tmp_path / "out" / "report.md").read_text()
    assert "training step" in page, "the programs of the run are listed"


def test_the_doctor_trains_a_step_there(hf_tpu):
    told = hf_tpu("doctor").stdout
    assert "torch_tpu [torch_tpu]" in told and "smoke" in told
