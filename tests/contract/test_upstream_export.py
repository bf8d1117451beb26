"""What exports rely on in transformers and PEFT."""

import inspect

from peft import LoraModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import Trainer
from transformers.trainer_utils import align_special_tokens


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_special_tokens_are_aligned_as_in_training():
    assert parameters(align_special_tokens) == ["model", "processing_class"]
    assert "align_special_tokens(self.model, self.processing_class)" in inspect.getsource(Trainer)


def test_merging():
    assert "safe_merge" in parameters(LoraModel.merge_and_unload)
    # `from_pretrained` hands it on.
    assert "torch_device" in parameters(PeftModel.load_adapter)
    assert {"get_base_model", "disable_adapter"} <= set(dir(PeftModel))
    assert "get_base_layer" in dir(BaseTunerLayer)
