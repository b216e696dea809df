"""The flags and environment switches of SGLang that are refused, as tables; `refusals.py` applies them.

A field that is in no table is SGLang's own business: it neither reaches the pools nor changes what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """One server argument of which only the values in `allowed` are served."""

    field: str
    allowed: tuple[Any, ...]
    why: str
    remedy: str = "drop the flag"


_OFF = (False, None)
_ONE = (1, None)
_UNSET: tuple[Any, ...] = (None,)


def _group(why: str, fields: Mapping[str, tuple[Any, ...]], remedy: str = "drop the flag") -> list[Rule]:
    return [Rule(field, allowed, why, remedy) for field, allowed in fields.items()]


_EXPERTS = "experts are sharded by tensor parallelism only"
_KERNELS = "it chooses kernels of another attention backend, which never run here"

RULES: tuple[Rule, ...] = (
    *_group(
        "slots hold no rejected tokens, so drafts cannot be rolled back",
        {
            "speculative_algorithm": _UNSET,
            "speculative_draft_model_path": _UNSET,
            "enable_multi_layer_eagle": _OFF,
            "speculative_adaptive": _OFF,
            "decoupled_spec_role": ("null", None),
            "enable_return_aux_hidden_states": _OFF,
        },
    ),
    *_group(
        "slots and snapshots have no transfer format between servers",
        {"disaggregation_mode": ("null", None), "enable_pd_role_switch": _OFF},
    ),
    *_group(
        "slots and snapshots live on the device, and no host or external tier knows their rows",
        {
            "enable_hierarchical_cache": _OFF,
            "hicache_storage_backend": _UNSET,
            "enable_unified_cache_external_linker": _OFF,
            "enable_lmcache": _OFF,
            "enable_flexkv": _OFF,
            "enable_hisparse": _OFF,
        },
    ),
    *_group(
        "it replaces or reshapes the pools that this plugin lays out itself",
        {
            "enable_unified_memory": _OFF,
            "enable_page_major_kv_layout": _OFF,
            "enable_kv_cache_sharding": _OFF,
            "prefill_only_disable_kv_cache": _OFF,
        },
    ),
    Rule("radix_cache_backend", _UNSET, "snapshots need SGLang's built-in unified radix cache"),
    Rule("enable_session_radix_cache", _OFF, "session references do not cover snapshots"),
    Rule("enable_streaming_session", _OFF, "a session would keep a slot beyond its request"),
    Rule("enable_memory_saver", _OFF, "the memory saver does not know the pools and would not release them"),
    Rule("kv_canary", ("none", None), "the canary has no reader for these rows"),
    *_group(
        "one rank must see all of a request's tokens to fill its window, tails and entries",
        {
            "dcp_size": _ONE,
            "attn_cp_size": _ONE,
            "enable_prefill_cp": _OFF,
            "enable_cp_decode_attn_tp": _OFF,
            "enable_dsa_cache_layer_split": _OFF,
            "enable_attn_tp_input_scattered": _OFF,
            "enable_layernorm_sp": _OFF,
            "enable_megamoe_for_layernorm_sp": _OFF,
        },
    ),
    *_group(
        "a slot spans all layers, so a rank cannot hold some of them",
        {"pp_size": _ONE, "enable_dynamic_chunking": _OFF},
    ),
    *_group(
        "idle ranks of attention data parallelism run padded steps without slots",
        {"enable_dp_attention": _OFF, "attn_dp_size": _ONE, "enable_dp_lm_head": _OFF},
        "use --dp-size for independent replicas",
    ),
    *_group(
        _EXPERTS,
        {
            "ep_size": _ONE,
            "moe_a2a_backend": ("none", None),
            "moe_dp_size": _ONE,
            "dwdp_size": _ONE,
            "moe_dense_tp_size": _UNSET,
            "enable_eplb": _OFF,
            "ep_num_redundant_experts": (0, None),
            "elastic_ep_backend": _UNSET,
            "ep_join_mode": _UNSET,
            "max_ep_size": _UNSET,
            "enable_waterfill": _OFF,
            "enable_w4a4_mxfp4_megamoe": _OFF,
            "enable_single_batch_overlap": _OFF,
        },
        "use --tp-size",
    ),
    Rule("enable_two_batch_overlap", _OFF, "two half batches would share one step's slot metadata"),
    Rule("enable_pdmux", _OFF, "concurrent prefill and decode streams would race on the slots"),
    Rule(
        "use_ray", _OFF, "Ray actors have not been shown to load the plugin", "start the server without Ray"
    ),
    Rule(
        "tokenizer_worker_num",
        _ONE,
        "further tokenizer workers start without plugins and cannot read the model config",
        "use --tokenizer-worker-num 1",
    ),
    *_group(
        "its servicer renders chats outside SGLang",
        {"smg_grpc_mode": _OFF, "grpc_mode": _OFF},
        "use the HTTP server",
    ),
    Rule("enable_mixed_chunk", _OFF, "a mixed step takes no snapshots for its decoding requests"),
    *_group(
        "cached rows depend on the adapter, and the attention projections take none",
        {"enable_lora": _OFF, "lora_paths": (None, [], {})},
    ),
    Rule("dllm_algorithm", _UNSET, "rows of a bidirectional block are not a function of the prefix"),
    Rule("enable_mis", _OFF, "the items of one sequence would share a window"),
    *_group(
        "the model is served as a causal text generator only",
        {"is_embedding": _OFF, "encoder_only": _OFF, "language_only": _OFF, "language_model_only": _OFF},
    ),
    Rule("enable_return_indexer_topk", _OFF, "the indexer's choices are not recorded"),
    *_group(
        "it is a DeepSeek-V4.1 feature, and replay is not exact",
        {"enable_encoder_swa_bounded_replay": _OFF, "enable_decoder_swa_bounded_replay": _OFF},
    ),
    Rule(
        "mamba_radix_cache_strategy",
        ("auto", "extra_buffer", None),
        "snapshots are taken into tracking slots, which only extra_buffer provides",
        "use extra_buffer or drop the flag",
    ),
    *_group(
        "a snapshot is a byte copy of its slot",
        {"enable_int8_mamba_checkpoint": _OFF, "int8_mamba_ckpt_size": _UNSET},
    ),
    *_group(
        "slots are not Mamba states and have their own fixed formats",
        {
            "mamba_ssm_dtype": _UNSET,
            "mamba_backend": ("triton", None),
            "enable_mamba_cache_stochastic_rounding": _OFF,
            "mamba_cache_philox_rounds": (0, None),
            "enable_linear_replayssm": _OFF,
            "enable_linear_replayssm_spec": _OFF,
            "linear_attn_backend": ("triton", None),
            "linear_attn_decode_backend": _UNSET,
            "linear_attn_prefill_backend": _UNSET,
            "linear_attn_verify_backend": _UNSET,
        },
    ),
    *_group(
        "rows carry their own scales",
        {"quantization_param_path": _UNSET, "prefill_kv_cache_dequant_dtype": ("auto", None)},
    ),
    *_group(
        "there is no window pool to size, because each request's window lives in its slot",
        {
            "swa_full_tokens_ratio": _UNSET,
            "swa_prefix_tails": _UNSET,
            "disable_hybrid_swa_memory": _OFF,
            "c128_page_size": (16, None),
        },
        "drop it and size snapshots with --max-mamba-cache-size",
    ),
    *_group(
        _KERNELS,
        {
            "dsv4_attn_backend": ("auto", None),
            "dsv4_prefill_backend": ("auto", None),
            "dsa_prefill_backend": _UNSET,
            "dsa_decode_backend": _UNSET,
            "dsa_topk_backend": ("sgl-kernel", None),
            "dsa_paged_mqa_logits_backend": ("auto", None),
            "dsa_triton_union": (0, None),
            "enable_dsa_fused_indexer": _OFF,
            "enable_lean_attention": _OFF,
            "enable_nvidia_megakernel": _OFF,
            "enable_amd_monokernel": _OFF,
        },
    ),
    Rule("enable_torch_compile", _OFF, "slot operations write pools in place and have not been traced"),
    *_group(
        "SGLang allows it for a fixed list of attention backends that does not contain this one",
        {"enable_deterministic_inference": _OFF, "rl_on_policy_target": _UNSET},
        "drop the flag (on a CPU results do not depend on the batch anyway)",
    ),
    Rule(
        "model_impl",
        ("auto", "sglang", None),
        "only this plugin's own model reads its pools",
        "drop the flag or use --model-impl sglang",
    ),
    Rule(
        "dtype",
        ("auto", "bfloat16", "float", "float32", None),
        "the model computes in bfloat16 or float32",
        "use --dtype bfloat16 or --dtype float32",
    ),
)

# On a CPU the plugin brings its own torch model, which knows nothing of these.
CPU_RULES: tuple[Rule, ...] = tuple(
    _group(
        "on a CPU the model is plain torch, one rank, with unquantised weights",
        {
            "tp_size": _ONE,
            "nnodes": _ONE,
            "quantization": _UNSET,
            "moe_runner_backend": ("auto", None),
            "enable_return_routed_experts": _OFF,
            "enable_paged_experts": _OFF,
            "kt_weight_path": _UNSET,
            "cpu_offload_gb": (0, None),
            "offload_group_size": (-1, 0, None),
        },
    )
)

# Single values of fields that are otherwise SGLang's own business.
REFUSED_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("load_format", "expert_pack", "its experts are paged by the in-tree model only"),
    ("moe_runner_backend", "flashinfer_megamoe", _EXPERTS),
    ("moe_runner_backend", "megamoe", _EXPERTS),
    ("moe_runner_backend", "lora_cutedsl", "there are no adapters"),
    ("moe_runner_backend", "lora_triton", "there are no adapters"),
    ("moe_runner_backend", "lora_marlin", "there are no adapters"),
)

# Environment switches of the in-tree pools that recipes export: they would change nothing here.
HARMLESS = ("", "0", "false", "no", "off", "auto", "v4", "float32")  # what the in-tree pools do anyway
_FORMATS = "row formats are chosen with SGLANG_DSV4_ROWS and SGLANG_DSV4_INDEXER"
ENVIRONMENT: tuple[tuple[str, str], ...] = (
    ("SGLANG_DSV4_KV_LAYOUT", _FORMATS),
    ("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", _FORMATS),
    ("SGLANG_DSV4_UNIFIED_KV_FP8", _FORMATS),
    ("SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE", "rows are quantised from the model's own activations"),
    ("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "tails and overlap rows are float32"),
    ("SGLANG_OPT_USE_ONLINE_COMPRESS", "HCA tails are kept as raw rows"),
    ("SGLANG_EXPERIMENTAL_ONLINE_C128_MTP", "HCA tails are kept as raw rows"),
    ("SGLANG_MAMBA_SSM_DTYPE", "slots are not Mamba states"),
    ("SGLANG_RUST_SERVER", "the Rust front end has not been shown to load the plugin"),
)
