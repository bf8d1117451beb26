"""What hosts that differ are refused is accepted once they do not. Another host's part is written down here."""

from types import SimpleNamespace

import pytest
from fixes import assert_fixes

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.backends.processes import HostsDisagree, Processes
from hf_tpu_ext.trainers.checkpoint.lookup import check_all_see, check_shared
from hf_tpu_ext.trainers.run.hosts import HostAgreement, check_same_settings


class TwoHosts(Processes):
    """The first of two, with what the second says instead of the same."""

    count = hosts = 2
    one_program = True
    word = "host"

    def __init__(self, answer=lambda what, value: value):
        self._answer = answer

    def exchange(self, what, value=None, error=None):
        if error is not None:
            raise error
        return [value, self._answer(what, value)]


def test_an_output_dir_that_one_host_does_not_see(tmp_path):
    blind = TwoHosts(lambda what, value: value if isinstance(value, str) else False)

    def check(load_best_model_at_end=False, hosts=blind):
        if load_best_model_at_end:
            check_shared(str(tmp_path), hosts)

    assert_fixes(check, {"load_best_model_at_end": True}, "leave load_best_model_at_end out")
    # Storage that all hosts share.
    check(True, TwoHosts())
    assert not list(tmp_path.iterdir())
    # Processes of torch_tpu may write on each host.
    blind.own_rows, blind.word = True, "process"
    with pytest.raises(HostsDisagree, match="process 1 does not see .*share, set save_on_each_node=True, or leave"):
        check(True)


def test_a_checkpoint_that_is_not_on_all_hosts(tmp_path):
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    for other, words in (
        (None, "host 1 does not see it"),
        ({"model.safetensors": 3}, "has another model.safetensors"),
    ):
        with pytest.raises(HostsDisagree, match=f"{words}.*Put output_dir on storage that all hosts see, or copy"):
            check_all_see(str(checkpoint), TwoHosts(lambda what, value, other=other: other))
    # Copied, or shared.
    check_all_see(str(checkpoint), TwoHosts())


def test_settings_that_differ():
    args = TPUSFTConfig("out", bf16=False)
    backend = SimpleNamespace(processes=TwoHosts(lambda what, value: {**value, "argument": {"learning_rate": "1"}}))
    with pytest.raises(
        HostsDisagree, match=r"Hosts differ, and would not train the same model\. .*argument .* on host 0,"
    ):
        check_same_settings(backend, args)
    # The same command.
    check_same_settings(SimpleNamespace(processes=TwoHosts()), args)


def test_programs_that_differ(xla):
    from hf_tpu_ext.backends.xla.compile import XLACompiledFunction

    def note(hosts):
        function = SimpleNamespace(_backend=SimpleNamespace(processes=hosts), _programs={})
        XLACompiledFunction._note(function, "a step", None, SimpleNamespace(handle=b"program"))

    with pytest.raises(
        HostsDisagree, match="Hosts have traced different programs for the same step.*goes by the host"
    ):
        note(TwoHosts(lambda what, value: ["another", None]))
    note(TwoHosts())


def test_rows_that_differ():
    def compare(hosts):
        hosts.checksum = 7
        return HostAgreement(SimpleNamespace(processes=hosts))._compare_sent("the first batch", [True])

    words = "Host 1 has sent other data to its chips than host 0 up to the first batch.*Give every host the same files"
    with pytest.raises(HostsDisagree, match=words):
        compare(TwoHosts(lambda what, value: [value[0], 8]))
    assert compare(TwoHosts()) == [True]
