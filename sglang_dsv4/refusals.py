"""What the plugin refuses, and what it makes of the flags that it takes.

Everything here is a pure function of the server arguments, the model config and the environment: no SGLang import,
no logging, no mutation.  `server_defaults.py` applies the result to SGLang's argument resolution.

A refusal is a `Refused` whose text is one line, ``what: why; what to do``.  Flags are judged on what the user asked
for (the raw record), never on what SGLang's own resolution made of it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .geometry import INDEX_LAYOUTS, MAIN_LAYOUTS, PAGE_SIZES, Geometry

ARCHITECTURE = "DeepseekV4SlotForCausalLM"
BACKEND = "dsv4_slot"  # the attention backend's and the config parser's name
TESTED_SGLANG = "0.5.23"
ALLOW_UNTESTED = "SGLANG_DSV4_ALLOW_UNTESTED"
ROWS = "SGLANG_DSV4_ROWS"
INDEXER = "SGLANG_DSV4_INDEXER"

DEFAULT_PAGE = 128  # tokens
DEFAULT_RUNNING = 256  # requests; the in-tree model's default
TRACK_INTERVAL_UNSET = 256  # SGLang's own default; the record does not say whether the user typed it


class Refused(ValueError):
    """The server must not start.  The text is one line: what, why, what to do.

    Takes the three parts, or a finished line.
    """

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        super().__init__(" ".join((f"{what}: {why}; {remedy}" if why else what).split()))


class Rule(NamedTuple):
    """One server argument of which only the values in `allowed` are served."""

    field: str
    allowed: tuple[Any, ...]
    why: str
    remedy: str = ""  # empty: drop the flag


_OFF = (False, None)
_ONE = (1, None)
_UNSET: tuple[Any, ...] = (None,)

_SNAPSHOT_ONLY = "slots and snapshots live on the device only and no host or external tier knows their rows"
_OTHER_POOL = "it replaces or reshapes the pools that this plugin lays out itself"
_SEQUENCE = "one rank must see a request's tokens in order to fill its window, tails and entries"
_DRAFTS = "slots hold no rejected tokens, so drafts cannot be rolled back"
_EXPERTS = "experts are sharded by tensor parallelism only"
_TRANSFER = "slots and snapshots have no transfer format between servers"
_FOREIGN_STATE = "slots are not Mamba states and have their own fixed formats"
_FOREIGN_KERNEL = "it selects kernels of another attention backend, which never run here"
_NO_WINDOW_POOL = "there is no window pool to size, because each request's window lives in its slot"
_SNAPSHOT_SIZING = "drop it and size snapshots with --max-mamba-cache-size"
_CAUSAL_TEXT = "the model is served as a causal text generator only"

RULES: tuple[Rule, ...] = (
    # Speculative decoding
    Rule("speculative_algorithm", _UNSET, _DRAFTS),
    Rule("speculative_draft_model_path", _UNSET, _DRAFTS),
    Rule("enable_multi_layer_eagle", _OFF, _DRAFTS),
    Rule("speculative_adaptive", _OFF, _DRAFTS),
    Rule("decoupled_spec_role", ("null", None), _DRAFTS),
    Rule("enable_return_aux_hidden_states", _OFF, "hidden states for draft training are not captured by this model"),
    # Several servers, host tiers, other caches
    Rule("disaggregation_mode", ("null", None), _TRANSFER),
    Rule("enable_pd_role_switch", _OFF, _TRANSFER),
    Rule("enable_hierarchical_cache", _OFF, _SNAPSHOT_ONLY),
    Rule("hicache_storage_backend", _UNSET, _SNAPSHOT_ONLY),
    Rule("enable_unified_cache_external_linker", _OFF, _SNAPSHOT_ONLY),
    Rule("enable_lmcache", _OFF, _SNAPSHOT_ONLY),
    Rule("enable_flexkv", _OFF, _SNAPSHOT_ONLY),
    Rule("enable_hisparse", _OFF, _SNAPSHOT_ONLY),
    Rule("radix_cache_backend", _UNSET, "snapshots need SGLang's built-in unified radix cache"),
    Rule("enable_session_radix_cache", _OFF, "session references do not cover snapshots"),
    Rule("enable_streaming_session", _OFF, "a session would keep a slot beyond its request"),
    Rule("enable_unified_memory", _OFF, _OTHER_POOL),
    Rule("enable_page_major_kv_layout", _OFF, _OTHER_POOL),
    Rule("enable_kv_cache_sharding", _OFF, _OTHER_POOL),
    Rule("prefill_only_disable_kv_cache", _OFF, _OTHER_POOL),
    Rule("enable_memory_saver", _OFF, "the pools are not registered with the memory saver and would not be released"),
    Rule("kv_canary", ("none", None), "the canary has no reader for these rows"),
    # Parallelism
    Rule("pp_size", _ONE, "a slot spans all layers"),
    Rule("enable_dynamic_chunking", _OFF, "it only serves pipeline parallelism, and its chunks are not whole pages"),
    Rule("dcp_size", _ONE, _SEQUENCE),
    Rule("attn_cp_size", _ONE, _SEQUENCE),
    Rule("enable_prefill_cp", _OFF, _SEQUENCE),
    Rule("enable_cp_decode_attn_tp", _OFF, _SEQUENCE),
    Rule("enable_dsa_cache_layer_split", _OFF, _SEQUENCE),
    Rule("enable_attn_tp_input_scattered", _OFF, _SEQUENCE),
    Rule("enable_layernorm_sp", _OFF, _SEQUENCE),
    Rule("enable_megamoe_for_layernorm_sp", _OFF, _SEQUENCE),
    Rule("enable_dp_attention", _OFF, "padded ranks of attention data parallelism have no slots", "use --dp-size alone"),
    Rule("attn_dp_size", _ONE, "padded ranks of attention data parallelism have no slots", "use --dp-size"),
    Rule("enable_dp_lm_head", _OFF, "it only serves attention data parallelism"),
    Rule("ep_size", _ONE, _EXPERTS, "use --tp-size"),
    Rule("moe_a2a_backend", ("none", None), _EXPERTS),
    Rule("moe_dp_size", _ONE, _EXPERTS, "use --tp-size"),
    Rule("dwdp_size", _ONE, _EXPERTS, "use --tp-size"),
    Rule("moe_dense_tp_size", _UNSET, _EXPERTS),
    Rule("enable_eplb", _OFF, _EXPERTS),
    Rule("ep_num_redundant_experts", (0, None), _EXPERTS),
    Rule("elastic_ep_backend", _UNSET, _EXPERTS),
    Rule("ep_join_mode", _UNSET, _EXPERTS),
    Rule("max_ep_size", _UNSET, _EXPERTS),
    Rule("enable_waterfill", _OFF, _EXPERTS),
    Rule("enable_w4a4_mxfp4_megamoe", _OFF, _EXPERTS),
    Rule("enable_two_batch_overlap", _OFF, "two half batches would share one step's slot metadata"),
    Rule("enable_single_batch_overlap", _OFF, "it only serves expert parallelism"),
    Rule("use_ray", _OFF, "Ray actors have not been shown to load the plugin", "start the server without Ray"),
    Rule("tokenizer_worker_num", _ONE, "extra tokenizer workers start without plugins and cannot read the model config",
         "use --tokenizer-worker-num 1"),
    Rule("smg_grpc_mode", _OFF, "its servicer renders chats outside SGLang", "use the HTTP server"),
    Rule("grpc_mode", _OFF, "its servicer renders chats outside SGLang", "use the HTTP server"),
    # Batches and requests
    Rule("enable_mixed_chunk", _OFF, "a mixed step takes no snapshots for its decoding requests"),
    Rule("enable_lora", _OFF, "cached rows depend on the adapter and attention projections take none"),
    Rule("lora_paths", (None, [], {}), "cached rows depend on the adapter and attention projections take none"),
    Rule("dllm_algorithm", _UNSET, "rows of a bidirectional block would not be a function of the prefix"),
    Rule("enable_mis", _OFF, "items of one sequence would share a window"),
    Rule("enable_pdmux", _OFF, "concurrent prefill and decode streams would race on the slots"),
    Rule("is_embedding", _OFF, _CAUSAL_TEXT),
    Rule("encoder_only", _OFF, _CAUSAL_TEXT),
    Rule("language_only", _OFF, _CAUSAL_TEXT),
    Rule("language_model_only", _OFF, "the model has no vision tower to leave out"),
    Rule("enable_return_indexer_topk", _OFF, "the indexer's choices are not recorded, so the answer would be empty"),
    Rule("enable_encoder_swa_bounded_replay", _OFF, "it is a DeepSeek-V4.1 feature and replay is not exact"),
    Rule("enable_decoder_swa_bounded_replay", _OFF, "it is a DeepSeek-V4.1 feature and replay is not exact"),
    # State formats and snapshots
    Rule("mamba_radix_cache_strategy", ("auto", "extra_buffer", None),
         "snapshots are taken into tracking slots, which only extra_buffer provides", "use extra_buffer or drop the flag"),
    Rule("enable_int8_mamba_checkpoint", _OFF, "a snapshot is a byte copy of its slot"),
    Rule("int8_mamba_ckpt_size", _UNSET, "a snapshot is a byte copy of its slot"),
    Rule("mamba_ssm_dtype", _UNSET, _FOREIGN_STATE),
    Rule("mamba_backend", ("triton", None), _FOREIGN_STATE),
    Rule("enable_mamba_cache_stochastic_rounding", _OFF, _FOREIGN_STATE),
    Rule("mamba_cache_philox_rounds", (0, None), _FOREIGN_STATE),
    Rule("enable_linear_replayssm", _OFF, _FOREIGN_STATE),
    Rule("enable_linear_replayssm_spec", _OFF, _FOREIGN_STATE),
    Rule("linear_attn_backend", ("triton", None), _FOREIGN_STATE),
    Rule("linear_attn_decode_backend", _UNSET, _FOREIGN_STATE),
    Rule("linear_attn_prefill_backend", _UNSET, _FOREIGN_STATE),
    Rule("linear_attn_verify_backend", _UNSET, _FOREIGN_STATE),
    Rule("quantization_param_path", _UNSET, "rows carry their own scales"),
    Rule("prefill_kv_cache_dequant_dtype", ("auto", None), "it only serves NVFP4 rows"),
    # Flags of the in-tree DeepSeek-V4 pools and kernels
    Rule("swa_full_tokens_ratio", _UNSET, _NO_WINDOW_POOL, _SNAPSHOT_SIZING),
    Rule("swa_prefix_tails", _UNSET, _NO_WINDOW_POOL, _SNAPSHOT_SIZING),
    Rule("disable_hybrid_swa_memory", _OFF, _NO_WINDOW_POOL),
    Rule("c128_page_size", (16, None), "HCA entries share the radix page"),
    Rule("dsv4_attn_backend", ("auto", None), _FOREIGN_KERNEL),
    Rule("dsv4_prefill_backend", ("auto", None), _FOREIGN_KERNEL),
    Rule("dsa_prefill_backend", _UNSET, _FOREIGN_KERNEL),
    Rule("dsa_decode_backend", _UNSET, _FOREIGN_KERNEL),
    Rule("dsa_topk_backend", ("sgl-kernel", None), _FOREIGN_KERNEL),
    Rule("dsa_paged_mqa_logits_backend", ("auto", None), _FOREIGN_KERNEL),
    Rule("dsa_triton_union", (0, None), _FOREIGN_KERNEL),
    Rule("enable_dsa_fused_indexer", _OFF, _FOREIGN_KERNEL),
    Rule("enable_lean_attention", _OFF, _FOREIGN_KERNEL),
    # Execution
    Rule("enable_torch_compile", _OFF, "slot operations write pools in place and have not been traced"),
    Rule("enable_nvidia_megakernel", _OFF, _FOREIGN_KERNEL),
    Rule("enable_amd_monokernel", _OFF, _FOREIGN_KERNEL),
    Rule("enable_deterministic_inference", _OFF,
         "SGLang admits it for a fixed list of attention backends that does not contain this one",
         "drop the flag (on a CPU results do not depend on the batch anyway)"),
    Rule("rl_on_policy_target", _UNSET, "it requires deterministic inference"),
    Rule("model_impl", ("auto", "sglang", None), "only this plugin's own model reads its pools",
         "drop the flag or use --model-impl sglang"),
    Rule("dtype", ("auto", "bfloat16", "float", "float32", None), "the residual streams overflow float16",
         "use --dtype bfloat16 or --dtype float32"),
)

# On a CPU the plugin brings its own torch model, which knows nothing of these.
CPU_RULES: tuple[Rule, ...] = tuple(
    Rule(field, allowed, "the CPU model is a plain torch model that reads unquantised weights on one rank")
    for field, allowed in (
        ("tp_size", _ONE),
        ("nnodes", _ONE),
        ("quantization", _UNSET),
        ("moe_runner_backend", ("auto", None)),
        ("enable_return_routed_experts", _OFF),
        ("enable_paged_experts", _OFF),
        ("kt_weight_path", _UNSET),
        ("cpu_offload_gb", (0, None)),
        ("offload_group_size", (-1, 0, None)),
    )
)  # fmt: skip

# Environment switches of the in-tree pools that recipes export: they would change nothing here.
ENVIRONMENT: tuple[tuple[str, str], ...] = (
    ("SGLANG_DSV4_KV_LAYOUT", "row formats are chosen with " + ROWS),
    ("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", "row formats are chosen with " + ROWS),
    ("SGLANG_DSV4_UNIFIED_KV_FP8", "row formats are chosen with " + ROWS),
    ("SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE", "rows are quantised from the model's own activations"),
    ("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "tails and overlap rows are float32"),
    ("SGLANG_OPT_USE_ONLINE_COMPRESS", "HCA tails are kept as raw rows"),
    ("SGLANG_EXPERIMENTAL_ONLINE_C128_MTP", "HCA tails are kept as raw rows"),
    ("SGLANG_MAMBA_SSM_DTYPE", "slots are not Mamba states"),
    ("SGLANG_RUST_SERVER", "the Rust front end has not been shown to load the plugin"),
)

_IN_TREE_BACKENDS = ("dsv4", "compressed")  # what DeepSeek-V4 recipes pass; `compressed` is the old name


class Decision(NamedTuple):
    """The outcome for a server that may start.

    `overrides` are fields that SGLang lets a model override; `declarations` are the other fields that are decided
    here, which SGLang accepts only from a resolution step.  `notes` are log lines, one per flag that was translated
    or has no effect.
    """

    overrides: dict[str, Any]
    declarations: dict[str, Any]
    notes: tuple[str, ...]


def flag(field: str, value: Any = True) -> str:
    """How a user would have typed it: ``--pp-size 2`` or ``--enable-lora``."""
    name = "--" + field.replace("_", "-")
    return name if value is True else f"{name} {value}"


def _value(args: Any, field: str) -> Any:
    return getattr(args, field, None)


def _check_rules(args: Any, rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        value = _value(args, rule.field)
        if value not in rule.allowed:
            raise Refused(f"{flag(rule.field, value)} is not supported", rule.why, rule.remedy or "drop the flag")


def _multiple_of_page(name: str, value: int, page: int, why: str) -> None:
    if value <= 0 or value % page:
        below, above = value // page * page, (value // page + 1) * page
        near = f"{below} or {above}" if below > 0 else f"{page}"
        raise Refused(f"{name} {value} is not a positive multiple of the page of {page} tokens", why, f"use {near}")


def page_size(args: Any) -> int:
    """Tokens of a radix page: the user's, or 128.  Raises Refused for a size that is not served."""
    value = _value(args, "page_size")
    if value is None:
        return DEFAULT_PAGE
    if value not in PAGE_SIZES:
        raise Refused(
            f"--page-size {value} is not supported",
            "a page must hold whole 128-token compression blocks, and larger pages than 256 only lengthen what a hit recomputes",
            "use --page-size 128 or --page-size 256",
        )
    return value


def typed(args: Any, field: str) -> bool:
    """Whether the launch command names that flag (SGLang keeps the command, not which fields were set)."""
    command = getattr(args, "_launch_command", None) or ""
    return re.search(rf"(?:--{field.replace('_', '-')}(?![\w-])|\b{field}=)", command) is not None


def track_interval(args: Any, page: int) -> int:
    """Tokens between decode snapshots: the user's, or one page.  Raises Refused when it is not whole pages."""
    value = _value(args, "mamba_track_interval")
    if value is None or (value == TRACK_INTERVAL_UNSET and not typed(args, "mamba_track_interval")):
        return page
    _multiple_of_page("--mamba-track-interval", value, page, "a snapshot stands at the end of a page")
    return value


def check_chunk(value: int | None, page: int) -> None:
    """Refuses a prefill chunk that is not whole pages.  None leaves the size to SGLang, whose sizes are powers of two."""
    if value is None:
        return
    if value == -1:
        raise Refused(
            "--chunked-prefill-size -1 is not supported",
            "one step's workspace and snapshots are bounded by the chunk and would grow with the prompt",
            "drop the flag or use a multiple of the page such as 8192",
        )
    _multiple_of_page("--chunked-prefill-size", value, page, "a chunk must end where a snapshot may stand")


def store_format(args: Any = None, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Formats of main rows (fp8, fp32) and indexer keys (fp4, fp8, fp32).

    SGLANG_DSV4_ROWS and SGLANG_DSV4_INDEXER choose them; every process of the server inherits the environment.
    Default: fp8 rows and fp4 keys; fp32 rows take fp32 keys unless told otherwise.  Raises Refused for an unknown
    name and for flags of `args` that contradict the choice.
    """
    env = os.environ if env is None else env
    rows = env.get(ROWS, "fp8")
    keys = env.get(INDEXER, "fp32" if rows == "fp32" else "fp4")
    for name, value, known in ((ROWS, rows, MAIN_LAYOUTS), (INDEXER, keys, INDEX_LAYOUTS)):
        if value not in known:
            raise Refused(f"{name}={value}", "there is no such row format", f"use one of {', '.join(known)}")
    dtype = _value(args, "kv_cache_dtype")
    if dtype not in ("auto", "fp8_e4m3", None):
        raise Refused(
            f"--kv-cache-dtype {dtype} is not supported",
            "rows are stored as FP8 e4m3 with BF16 rotary channels, or exactly in float32",
            f"use auto or fp8_e4m3, or set {ROWS}=fp32 for exact rows",
        )
    if dtype == "fp8_e4m3" and rows != "fp8":
        raise Refused(f"--kv-cache-dtype fp8_e4m3 with {ROWS}={rows}", "they contradict each other", "drop one of them")
    if _value(args, "enable_deepseek_v4_fp4_indexer") and keys != "fp4":
        raise Refused(
            f"--enable-deepseek-v4-fp4-indexer with indexer format {keys}",
            f"they contradict each other ({ROWS}={rows}, {INDEXER}={env.get(INDEXER, 'unset')})",
            "drop one of them",
        )
    return rows, keys


def _attention_backends(args: Any, notes: list[str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"attention_backend": BACKEND}
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = _value(args, field)
        if value in (None, BACKEND):
            continue
        if value not in _IN_TREE_BACKENDS:
            raise Refused(
                f"{flag(field, value)} is not supported",
                "no other backend reads rows from pages and slots",
                f"drop the flag or use --attention-backend {BACKEND}",
            )
        chosen[field] = BACKEND
        notes.append(f"{flag(field, value)} is the in-tree backend; {BACKEND} serves this model instead")
    return chosen


def _graphs(args: Any) -> dict[str, Any]:
    """Prefill always runs eagerly; decode graphs stay as the user wants them."""
    why = "a prefill chunk's workspace and snapshot positions are not graph-static"
    backend = _value(args, "cuda_graph_backend_prefill")
    if backend not in (None, "disabled"):
        raise Refused(flag("cuda_graph_backend_prefill", backend) + " is not supported", why, "drop the flag")
    config = _value(args, "cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, Mapping) else getattr(config, "prefill", None)
    if prefill is not None:
        backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", None)
        if backend not in (None, "disabled"):
            raise Refused(
                f"--cuda-graph-config with prefill backend {backend} is not supported", why, "leave prefill out of it"
            )
    return {"disable_prefill_cuda_graph": True}


def check_device(device: str | None) -> None:
    """Refuses a device other than cuda and cpu.  None is not known yet."""
    if device is not None and device.split(":", 1)[0] not in ("cuda", "cpu"):
        raise Refused(f"--device {device} is not supported", "there are kernels for CUDA and references for CPU", "use cuda or cpu")


def check_environment(env: Mapping[str, str]) -> None:
    """Refuses environment switches of the in-tree model that would silently do nothing."""
    for name, why in ENVIRONMENT:
        if env.get(name):
            raise Refused(f"{name}={env[name]} has no effect on this model", why, "unset it")


def check_version(installed: str, env: Mapping[str, str] | None = None) -> str | None:
    """Refuses an SGLang that was not tested; returns a warning line where the user allowed it, else None."""
    if installed == TESTED_SGLANG:
        return None
    env = os.environ if env is None else env
    if env.get(ALLOW_UNTESTED) == "1":
        return f"SGLang {installed} is not the tested {TESTED_SGLANG}; {ALLOW_UNTESTED}=1 goes on where every hook's signature matches"
    raise Refused(
        f"SGLang {installed} is installed",
        f"hooks and pools were tested with {TESTED_SGLANG} only",
        f"install sglang=={TESTED_SGLANG} or set {ALLOW_UNTESTED}=1",
    )


class _Attributes(Mapping[str, Any]):
    """A config object read like its JSON."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._config, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._config))

    def __len__(self) -> int:
        return len(vars(self._config))


def geometry_of(args: Any, hf_config: Any, env: Mapping[str, str] | None = None) -> Geometry:
    """The model's geometry under the user's page size and row formats.

    `hf_config` is a mapping or a config object.  Raises Refused for a checkpoint that the pools cannot hold.
    """
    rows, keys = store_format(args, env)
    config = hf_config if isinstance(hf_config, Mapping) else _Attributes(hf_config)
    try:
        return Geometry.from_config(config, page_size=page_size(args), store=rows, indexer=keys)
    except ValueError as error:
        raise Refused(str(error)) from None


def refuse_checkpoint(raw: Mapping[str, Any]) -> None:
    """Refuses a config.json that the pools cannot hold, whatever the flags."""
    geometry_of(None, raw, env={})


def check_pool_size(
    *,
    page: int,
    pool_tokens: int,
    state_slots: int,
    slots_per_request: int,
    geometry: Geometry | None = None,
) -> None:
    """Refuses pools that cannot serve a single request.

    `pool_tokens` are the tokens of the page pool; `state_slots` the slots that requests can be given (the dummy slot
    0 not counted); `slots_per_request` SGLang's ratio (5 with overlap scheduling, 4 without, 1 without radix cache).
    A prompt of one page needs three pages: its own, the one its answer starts, and one that SGLang holds back at
    admission; with less the request would wait for ever.
    """
    tokens = 3 * page
    size = ""
    if geometry is not None:
        size = f" ({geometry.page_pool_bytes(tokens)} B of pages, {geometry.slot_pool_bytes(slots_per_request)} B of slots)"
    if pool_tokens < tokens:
        raise Refused(
            f"the page pool has room for {max(pool_tokens, 0)} tokens",
            f"one request needs {tokens} tokens (3 pages of {page}) and {slots_per_request} slots{size}",
            f"raise --mem-fraction-static, or --max-total-tokens to at least {tokens}, or lower --max-running-requests",
        )
    if state_slots < slots_per_request:
        raise Refused(
            f"the slot pool has {max(state_slots, 0)} slots",
            f"one request needs {slots_per_request} slots and {tokens} tokens{size}",
            f"raise --mem-fraction-static, or --max-mamba-cache-size to at least {slots_per_request}",
        )


def decide(args: Any, *, device: str | None = None, env: Mapping[str, str] | None = None) -> Decision:
    """Judges the flags (not the model).  `device` is the resolved device, where known.

    Returns what SGLang's fields are to be; a value that the user set and that is served is returned unchanged.
    Raises Refused for the first thing that is not served.
    """
    env = os.environ if env is None else env
    notes: list[str] = []
    device = device or _value(args, "device")
    check_device(device)
    check_environment(env)
    _check_rules(args, RULES)
    if device is not None and device.startswith("cpu"):
        _check_rules(args, CPU_RULES)
    page = page_size(args)
    check_chunk(_value(args, "chunked_prefill_size"), page)
    interval = track_interval(args, page)
    rows, keys = store_format(args, env)
    overrides = {
        "page_size": page,
        "mamba_radix_cache_strategy": "extra_buffer",
        **_attention_backends(args, notes),
    }
    running = _value(args, "max_running_requests")
    declarations = {
        "mamba_track_interval": interval,
        "max_running_requests": DEFAULT_RUNNING if running is None else running,
        **_graphs(args),
    }
    if _value(args, "kv_cache_dtype") == "fp8_e4m3":
        overrides["kv_cache_dtype"] = "auto"  # SGLang's own FP8 checks are about pools that do not exist here
        notes.append("--kv-cache-dtype fp8_e4m3 is what the rows store already; the plugin's own format is used")
    if _value(args, "enable_deepseek_v4_fp4_indexer"):
        declarations["enable_deepseek_v4_fp4_indexer"] = False  # SGLang would demand Blackwell for its own kernel
        notes.append("--enable-deepseek-v4-fp4-indexer is the default here, on every device")
    notes.append(f"rows {rows}, indexer keys {keys}, page {page} tokens, decode snapshots every {interval} tokens")
    return Decision(overrides, declarations, tuple(notes))


def excepthook(previous: Callable[..., Any]) -> Callable[..., Any]:
    """A `sys.excepthook` that prints a `Refused` as its one line and hands everything else to `previous`."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Refused):
            sys.stderr.write(f"sglang-dsv4: {error}\n")
        else:
            previous(kind, error, trace)

    return hook
