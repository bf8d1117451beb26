"""Sizes of a tiny model of each family: two layers, or one period of layers that alternate."""

import re
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


VOCABULARY = 64

#: By the name of a field, for whichever family has it.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "hidden_dim": 48,
    "dim_head": 8,
    "d_kv": 8,
    "ffn_hidden_size": 48,
    "n_inner": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "type_vocab_size": 2,
    # The usual 0.02 suits widths of a thousand and more.
    "initializer_range": 0.1,
    "init_std": 0.1,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # Attention of low rank.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 8,
    # Of fewer heads, scores of several tokens are 0, and which of them is taken is anybody's choice.
    "index_n_heads": 8,
    # State over the row.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "mamba_expand": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "hc_lowrank": 8,
    # Images and sound, which text alone does not use.
    "depth": 2,
    "num_filters": 2,
    "base_channels": 32,
    "codebook_dim": 32,
    "codebook_size": 8,
    "out_hidden_size": 32,
    "projector_hidden_size": 32,
    "merged_hidden_size": 32,
    "text_hidden_size": 32,
    "audio_hidden_size": 32,
    "alignment_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "latent_query_num": 4,
    "vocabulary_map": {"<image>": VOCABULARY - 1},
    "video_temporal_patch_size": 2,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
}

#: The same of tokens: padding, the beginning and the end. All others, such as those of images, are the last.
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _images_rope(*sections: int) -> dict[str, Any]:
    """Positions of time, height and width, each with some of the frequencies."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


#: What a family needs besides, or otherwise: sizes under names of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"backbone_hidden_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "minimax_m3_vl_text": {
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "laguna": {"layer_types": ["full_attention", "sliding_attention"]},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "adapter_rank": 8},
    "bailing_hybrid": {
        "n_group": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "layer_group_size": 2,
    },
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "blt_local_decoder": {"hidden_size_global": 32},
    "blt_local_encoder": {"hidden_size_global": 32},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "cpmant": {"dim_ff": 48, "prompt_length": 2},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_shared_experts": 1},
    "codegen": {"rotary_dim": 4},
    "ctrl": {"dff": 48},
    "dbrx": {"max_seq_len": 64, "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 8, "num_key_value_heads": 1},
    "dots3_note_text": {
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 16,
    },
    "ernie4_5_vl_moe_text": {
        "rope_parameters": _images_rope(1, 1, 2),
        "moe_intermediate_size": [16, 16],
        "moe_num_experts": 4,
        "moe_k": 2,
    },
    "esmc": {"num_key_value_heads": 4},
    "glm4v_moe_text": {"rope_parameters": _images_rope(1, 1, 0) | {"partial_rotary_factor": 0.5}},
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0, "head_dim": 0},
    "janus_vqgan": {
        "num_embeddings": 64,
        "embed_dim": 8,
        "latent_channels": 8,
        "channel_multiplier": [1, 1],
        "projection_dim": 32,
    },
    "janus_vision_model": {"projection_dim": 32, "image_size": 32},
    "kosmos_2_text_model": {"embed_dim": 32, "layers": 2, "attention_heads": 4},
    "kosmos_2_5_text_model": {"embed_dim": 32, "layers": 2, "attention_heads": 4},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "qwen2_vl_vision": {"embed_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
        "mlp_layer_types": ["dense", "dense"],
        "per_layer_config": {},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "granite_speech_encoder": {"hidden_dim": 32},
    "granite_speech_plus_encoder": {"hidden_dim": 32},
    "florence_vision": {"depths": [1] * 4, "embed_dim": [32] * 4},
    "diffusion_gemma_text": {"top_k_experts": 2},
    "apertus1p5": {"image_token_offset": 32, "audio_token_offset": 40},
    "muse_spark_audio": {"patch_sizes": (16, 6), "hidden_sizes": (32, 32), "depths": (1, 1)},
    "distilbert": {"dim": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "funnel": {"d_inner": 48, "d_head": 8, "block_sizes": [1, 1], "num_decoder_layers": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": VOCABULARY, "entity_emb_size": 16},
    # With SDPA, upstream lets tokens of a batch without padding and without a prefix see later ones.
    "paligemma": {"attn_implementation": "eager"},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
        "num_experts": None,
        "moe_intermediate_size": None,
    },
    "gemma4_unified_text": {"global_head_dim": 8},
    "gemma4_unified_assistant": {"backbone_hidden_size": 32},
    "flaubert": {"emb_dim": 32},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "inkling_vision": {"patch_size": 4},
    "inkling_text": {"d_rel": 4, "rel_extent": 16},
    "inkling2_text": {"d_rel": 4, "rel_extent": 16, "unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {"d_rel": 4, "rel_extent": 16, "unpadded_vocab_size": VOCABULARY},
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {"num_key_value_heads": 4},
    "longcat_flash": {"zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"expand": 2, "hidden_size": 32, "num_heads": 8, "head_dim": 8},
    "mpt": {"max_seq_len": 64},
    "prophetnet": {"num_buckets": 8, "relative_max_distance": 16},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
        "attention_head_size": 8,
        "feed_forward_size": 48,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": VOCABULARY,
        "shape_embed_dim": 8,
    },
    # Its eager attention knows no groups of heads, and its models have none.
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlm": {"emb_dim": 32},
    "xlnet": {"d_inner": 48},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def tiny_config(model_type: str, decoder: bool = False, periods: int = 1) -> PreTrainedConfig:
    """
    The configuration of the tiny model of a family, with so many periods of its layers. A `decoder` is causal where a family has
    both forms.
    """
    config = _shrink(AutoConfig.for_model(model_type), periods)
    if decoder and vars(config).get("is_decoder") is False and not config.is_encoder_decoder:
        config.is_decoder = True
    if model_type == "encoder-decoder":
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
    if config.is_encoder_decoder and vars(config).get("decoder_start_token_id") is None:
        # Families that leave it to the configuration of a checkpoint.
        config.decoder_start_token_id = TOKENS["decoder_start_token_id"]
    return config


# Fields that make a step depend on random numbers, which are others on each device.
_RANDOM = re.compile("dropout|pdrop|layerdrop|jitter")
# How many layers there are, and lists with an entry for each.
_OF_LAYERS = re.compile("(num_|num_hidden_|n_|decoder_)layers?$|_types?$|sparsity_pattern$")


def _shrink(config: PreTrainedConfig, periods: int) -> PreTrainedConfig:
    named = vars(config)
    # What has a size for each stage keeps them.
    fields = {n: v for n, v in (SIZES | TOKENS).items() if n in named and not isinstance(named[n], list | tuple)}
    if "mrope_section" in type(config).ignore_keys_at_rope_validation:
        fields["rope_parameters"] = _images_rope(2, 1, 1)
    if "kv_lora_rank" in named:
        fields["num_key_value_heads"] = SIZES["num_attention_heads"]
    if len(kinds := list(dict.fromkeys(named.get("layer_types") or []))) > 1:
        # One layer of each kind.
        fields |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    for name, value in named.items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = _shrink(value, periods)
        elif isinstance(value, float) and _RANDOM.search(name):
            fields[name] = 0.0
        elif isinstance(value, int) and name.endswith(("token_id", "token_index")) and name not in TOKENS:
            fields[name] = VOCABULARY - 1
    fields |= FAMILIES.get(config.model_type, {})
    of_layers = {name: value * periods for name, value in fields.items() if _OF_LAYERS.search(name)}
    return type(config)(**fields | of_layers)
