"""Activation checkpointing trains what upstream trains, whatever the inputs of a layer need."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import unwrap_peft_model

from hf_tpu_ext.layers.activation_checkpointing import rematerialize
from hf_tpu_ext.layers.attention import static_masks


class Block(GradientCheckpointingLayer):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, values, scale=None):
        return values + scale * torch.tanh(self.linear(values)), {"parts": [values.sum()]}


class SensorConfig(PreTrainedConfig):
    model_type = "sensor"


class Sensor(PreTrainedModel):
    """Layers over measured values, without an embedding; a trained tensor comes to them as a keyword."""

    config_class = SensorConfig
    supports_activation_checkpointing = supports_gradient_checkpointing = True
    main_input_name = "values"

    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.post_init()

    def forward(self, values, labels):
        parts = 0.0
        for block in self.blocks:
            values, others = block(values, scale=self.scale.exp())
            parts = parts + others["parts"][0]
        return {"loss": (values.mean(-1) - labels).square().mean() + 1e-2 * parts}


def sensor():
    return Sensor(SensorConfig()), {"values": torch.randn(4, 8), "labels": torch.randn(4)}


def llama():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 32, (2, 8))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def frozen_embedding():
    model, batch = llama()
    model.model.embed_tokens.requires_grad_(False)
    return model, batch


def frozen_first_layers():
    model, batch = llama()
    model.requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    return model, batch


def with_lora(model, **settings):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    return get_peft_model(model, config)


def lora_on_the_last_layer():
    model, batch = llama()
    return with_lora(model, layers_to_transform=[2]), batch


def encoder():
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **shape)
    model = BertForSequenceClassification(config)
    model.bert.embeddings.requires_grad_(False)
    ids = torch.randint(0, 32, (2, 8))
    return model, {"input_ids": ids, "labels": torch.tensor([0, 1]), "attention_mask": torch.ones_like(ids)}


def encoder_decoder():
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, dropout_rate=0, decoder_start_token_id=0, **shape))
    ids = torch.randint(0, 32, (2, 8))
    return model, {"input_ids": ids, "labels": ids[:, :6].contiguous(), "attention_mask": torch.ones_like(ids)}


def images():
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **shape))
    model.vit.embeddings.requires_grad_(False)
    return model, {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


def speech_encoder():
    layers = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    none_drawn = dict.fromkeys(
        (
            "mask_time_prob",
            "layerdrop",
            "hidden_dropout",
            "attention_dropout",
            "activation_dropout",
            "feat_proj_dropout",
        ),
        0.0,
    )
    config = Wav2Vec2Config(
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        initializer_range=0.1,
        **layers,
        **convolutions,
        **none_drawn,
    )
    model = with_lora(Wav2Vec2ForSequenceClassification(config), modules_to_save=["classifier"])
    return model, {"input_values": torch.randn(2, 200), "labels": torch.tensor([0, 1])}


def speech_to_text():
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        vocab_size=32,
        d_model=16,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        use_cache=False,
        **sides,
        **tokens,
    )
    model = with_lora(WhisperForConditionalGeneration(config))
    return model, {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 32, (2, 8))}


KINDS = [
    sensor,
    frozen_embedding,
    frozen_first_layers,
    lora_on_the_last_layer,
    encoder,
    encoder_decoder,
    images,
    speech_encoder,
    speech_to_text,
]


def gradients_of(model, batch):
    # As a trainer calls it: PEFT's model of no task has no such arguments.
    unwrap_peft_model(model)(**batch)["loss"].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(xla, make, policy):
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    ours, without = deepcopy(model), deepcopy(model)
    for each in (model, ours):
        unwrap_peft_model(each).gradient_checkpointing_enable({"use_reentrant": False})
    upstreams = gradients_of(model, batch)
    xla.place(ours)
    xla.place(without)
    rematerialize(ours, policy, xla)
    sent = xla.send(batch)
    xla.wait()
    with static_masks():
        found, expected = xla.fetch((gradients_of(ours, sent), gradients_of(without, sent)))
    missing = {name for name, gradient in upstreams.items() if gradient is None}
    assert {name for name, gradient in found.items() if gradient is None} == missing
    assert len(missing) < len(expected)
    for name in expected.keys() - missing:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )
        # Float32 on two devices.
        assert (found[name] - upstreams[name]).norm() < 1e-4 * upstreams[name].norm() + 1e-6, name


@pytest.mark.ci
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_gradient_is_missing_exactly_where_upstreams_is(xla, make):
    compare(xla, make, "full")


@pytest.mark.parametrize("make", [sensor, frozen_first_layers, speech_to_text], ids=lambda make: make.__name__)
def test_with_products_that_are_kept(xla, make, monkeypatch):
    monkeypatch.setattr("hf_tpu_ext.layers.activation_checkpointing._LEAST_SUMMED", 8)
    compare(xla, make, "dots")
