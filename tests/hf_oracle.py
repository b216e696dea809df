"""transformers' DeepseekV4ForCausalLM with the weights of an official-format checkpoint, as an oracle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Fields that mean the same in both configurations.
_SHARED = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim q_lora_rank num_experts_per_tok n_routed_experts n_shared_experts scoring_func norm_topk_prob "
    "routed_scaling_factor max_position_embeddings rope_theta compress_rope_theta hc_mult hc_sinkhorn_iters "
    "hc_eps num_hash_layers swiglu_limit sliding_window o_groups o_lora_rank index_n_heads index_head_dim "
    "index_topk rms_norm_eps tie_word_embeddings qk_rope_head_dim bos_token_id eos_token_id"
).split()

# Official name -> HF name, below the layer. The compressor's two channel halves keep their place, whatever
# either side calls them.
_COMPRESSOR = {"ape": "position_bias", "wkv.weight": "kv_proj.weight", "wgate.weight": "gate_proj.weight"}
_COMPRESSOR["norm.weight"] = "kv_norm.weight"
_LAYER = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    **{f"attn.compressor.{ours}": f"self_attn.compressor.{hf}" for ours, hf in _COMPRESSOR.items()},
    **{f"attn.indexer.compressor.{ours}": f"self_attn.compressor.indexer.{hf}" for ours, hf in _COMPRESSOR.items()},
    **{f"hc_{sub}_{part}": f"{sub}_hc.{part}" for sub in ("attn", "ffn") for part in ("fn", "base", "scale")},
}
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight")


def hf_state_dict(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """HF's state dict of official weights; experts are stacked, gate and up fused."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in weights.items():
        if match := _EXPERT.fullmatch(name):
            layer, expert, part = match.groups()
            experts.setdefault(layer, {})[int(expert), part] = value
        elif name in _TOP:
            state[_TOP[name]] = value
        else:
            _, layer, rest = name.split(".", 2)
            state[f"model.layers.{layer}.{_LAYER[rest]}"] = value
    for layer, parts in experts.items():
        count = len(parts) // 3
        fused = [torch.cat([parts[e, "w1"], parts[e, "w3"]]) for e in range(count)]
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(fused)
        down = [parts[e, "w2"] for e in range(count)]
        state[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(down)
    return state


def hf_model(raw: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """The float32 eager model of a raw config.json and official weights."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    yarn = {key: value for key, value in raw["rope_scaling"].items() if key != "type"}
    config = DeepseekV4Config(
        **{key: raw[key] for key in _SHARED},
        compress_ratios=list(raw["compress_ratios"]),
        rope_parameters={"rope_type": "yarn", **yarn},
        attn_implementation="eager",
    )
    model = DeepseekV4ForCausalLM(config).float().eval()
    model.load_state_dict(hf_state_dict(weights), strict=True)
    return model
