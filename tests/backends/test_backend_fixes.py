"""Variables and settings of an accelerator that a message refuses are accepted once they are set as it says."""

import pytest
from fixes import assert_fixes, refusal
from transformers import GenerationConfig

from hf_tpu_ext.backends import compile_cache, detect, selection, slice_hosts
from hf_tpu_ext.generation.sampling import check_generation_config


@pytest.fixture
def with_variables(monkeypatch):
    """Calls a function with environment variables."""

    def wrap(function, *names):
        def check(**settings):
            for name in names:
                # What the function itself sets is taken back, too.
                monkeypatch.setenv(name, "")
                monkeypatch.delenv(name)
            for name in names:
                if name in settings:
                    monkeypatch.setenv(name, str(settings[name]))
            return function(**{name: value for name, value in settings.items() if name not in names})

        return check

    return wrap


@pytest.mark.parametrize("value", ["eight", "0", "-1"])
def test_devices_of_the_host(with_variables, value):
    check = with_variables(lambda: detect.local_chips("CPU"), "CPU_NUM_DEVICES")
    assert_fixes(check, {"CPU_NUM_DEVICES": value}, "Set it to 1", "for example CPU_NUM_DEVICES=8")
    assert check() == 1


def test_a_part_of_a_host(with_variables):
    names = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")
    check = with_variables(lambda num_chips: detect.show_chips("TPU", num_chips, 8), *names)
    assert_fixes(check, {"num_chips": 3}, "Set num_chips to one of 1, 2, 4, 8.")


def test_chips_that_are_wanted(with_variables):
    check = with_variables(lambda: selection._wanted_chips(None), "TPU_NUM_DEVICES")
    message = refusal(check, {"TPU_NUM_DEVICES": "many"})
    for number in ("1", "4", "8"):
        assert number in message.partition("Set it to ")[2]
        check(TPU_NUM_DEVICES=number)
    check()


def test_seconds_of_silence(with_variables):
    check = with_variables(slice_hosts.read_seconds, slice_hosts.SILENCE_VARIABLE)
    assert_fixes(check, {slice_hosts.SILENCE_VARIABLE: "soon"}, "Set it to 60")
    assert check() == 60


def test_a_directory_for_compiled_programs():
    message = refusal(lambda setting: compile_cache.cache_root(setting), {"setting": ""})
    assert "Set it to 'auto', to 'off' or to a directory." in message
    for setting in ("auto", "off", "directory"):
        compile_cache.cache_root(setting)


def test_tracing_without_torch_xla(monkeypatch):
    monkeypatch.setattr(selection, "has_torch_xla", lambda: False)
    message = refusal(lambda: selection.select_tracing(8), {})
    assert "Ahead-of-time tracing needs torch_xla, which is not installed: pip install " in message


@pytest.mark.parametrize("setting", [{"min_length": 4}, {"num_beams": 2}, {"min_length": 9}], ids=str)
def test_settings_of_a_generation(setting):
    assert_fixes(lambda **settings: check_generation_config(GenerationConfig(**settings)), setting, "Leave it out")
