"""What the plugin refuses, and what it makes of the flags that it takes.

Everything here is a pure function of the server arguments, the model config and the environment: no SGLang
import, no logging, no mutation (`install_excepthook` apart). `server_defaults.py` applies it to SGLang's
resolution.

A refusal is a `Refused` whose text is one line, ``what: why; what to do``. Flags are judged on what the user
asked for (the raw record), never on what SGLang's own resolution made of it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .flag_rules import CPU_RULES, ENVIRONMENT, HARMLESS, REFUSED_VALUES, RULES, Rule
from .geometry import INDEX_LAYOUTS, MAIN_LAYOUTS, PAGE_SIZES, Geometry
from .switches import CHECK_RANKS, REFERENCE, SPLIT, switched_on

ARCHITECTURE = "DeepseekV4SlotForCausalLM"
BACKEND = "dsv4_slot"  # the attention backend's and the config parser's name
TESTED_SGLANG = "0.5.23"
ALLOW_UNTESTED = "SGLANG_DSV4_ALLOW_UNTESTED"
ROWS = "SGLANG_DSV4_ROWS"
INDEXER = "SGLANG_DSV4_INDEXER"

DEFAULT_PAGE = 128  # tokens
DEFAULT_RUNNING = 256  # requests; the in-tree model's default
# Snapshots that a path keeps when slots run out; see cache/superseded.py
DEFAULT_PER_PATH = 1
ONE_REQUEST_PAGES = 3  # see check_pool_tokens
TRACK_INTERVAL_UNSET = 256  # SGLang's own default; the record does not say whether the user typed it


class Refused(ValueError):
    """The server must not start, or not go on. The text is one line: what, why, what to do.

    Takes the three parts, or a finished line.
    """

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        super().__init__(" ".join((f"{what}: {why}; {remedy}" if why else what).split()))


# What the geometry reads, and what decides which model is served.
_LAYOUT_FIELDS = frozenset(
    (
        "architectures model_type kv_source_layer_ids compress_ratios num_hidden_layers num_attention_heads "
        "hidden_size head_dim qk_rope_head_dim sliding_window index_head_dim index_n_heads index_topk"
    ).split()
)
_IN_TREE_BACKENDS = ("dsv4", "compressed")  # what DeepSeek-V4 recipes pass; `compressed` is the old name


class Decision(NamedTuple):
    """The outcome for a server that may start.

    overrides     fields that SGLang lets a model override
    declarations  the other fields decided here, which SGLang accepts from a resolution step only
    notes         log lines: one for each flag that was translated, and the formats and sizes in effect
    """

    overrides: dict[str, Any]
    declarations: dict[str, Any]
    notes: tuple[str, ...]


def flag(field: str, value: Any = True) -> str:
    """How a user would have typed it: ``--pp-size 2`` or ``--enable-lora``."""
    name = "--" + ("elastic_ep_join_mode" if field == "ep_join_mode" else field).replace("_", "-")
    return name if value is True else f"{name} {value}"


def _value(args: Any, field: str) -> Any:
    return getattr(args, field, None)


def _check_rules(args: Any, rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        value = _value(args, rule.field)
        if value not in rule.allowed:
            raise Refused(f"{flag(rule.field, value)} is not supported", rule.why, rule.remedy)
    for field, value, why in REFUSED_VALUES:
        if _value(args, field) == value:
            raise Refused(f"{flag(field, value)} is not supported", why, "drop the flag")


def _multiple_of_page(name: str, value: int, page: int, why: str) -> None:
    if value <= 0 or value % page:
        below, above = value // page * page, (value // page + 1) * page
        near = f"{below} or {above}" if below > 0 else f"{page}"
        raise Refused(f"{name} {value} is not a multiple of the page of {page} tokens", why, f"use {near}")


def page_size(args: Any) -> int:
    """Tokens of a radix page: the user's, or 128. Raises Refused for a size that is not served."""
    value = _value(args, "page_size")
    if value is None:
        return DEFAULT_PAGE
    if value not in PAGE_SIZES:
        raise Refused(
            f"--page-size {value} is not supported",
            "a page holds whole 128-token compression blocks, and a hit resumes at the end of a page",
            "use --page-size 128 or --page-size 256",
        )
    return value


def typed(args: Any, field: str) -> bool:
    """Whether the launch command names that flag (SGLang keeps the command, not which fields were set)."""
    command = getattr(args, "_launch_command", None) or ""
    return re.search(rf"(?:--{field.replace('_', '-')}(?![\w-])|\b{field}=)", command) is not None


def track_interval(args: Any, page: int) -> int:
    """Tokens between decode snapshots: the user's, or one page. Raises Refused if not whole pages."""
    value = _value(args, "mamba_track_interval")
    if value is None or (value == TRACK_INTERVAL_UNSET and not typed(args, "mamba_track_interval")):
        return page
    _multiple_of_page("--mamba-track-interval", value, page, "a snapshot stands at the end of a page")
    return value


def check_chunk(value: int | None, page: int) -> None:
    """Refuses a prefill chunk that is not whole pages. None leaves it to SGLang (2,048 or more)."""
    if value is None:
        return
    if value == -1:
        raise Refused(
            "--chunked-prefill-size -1 is not supported",
            "one step's workspace is bounded by the chunk and would grow with the prompt",
            "drop the flag or use a multiple of the page such as 8192",
        )
    _multiple_of_page("--chunked-prefill-size", value, page, "a chunk must end where a snapshot may stand")


def store_format(args: Any = None, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Formats of main rows (fp8, fp32) and indexer keys (fp4, fp8, fp32).

    SGLANG_DSV4_ROWS and SGLANG_DSV4_INDEXER choose them; every process of a server inherits the environment.
    Default: fp8 rows and fp4 keys; fp32 rows take fp32 keys unless told otherwise. Raises Refused for an
    unknown name and for flags of `args` that contradict the choice.
    """
    env = os.environ if env is None else env
    rows = env.get(ROWS) or "fp8"
    keys = env.get(INDEXER) or ("fp32" if rows == "fp32" else "fp4")
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
        raise Refused(f"--kv-cache-dtype fp8_e4m3 with {ROWS}={rows}", "they contradict each other", "drop one")
    if _value(args, "enable_deepseek_v4_fp4_indexer") and keys != "fp4":
        raise Refused(
            f"--enable-deepseek-v4-fp4-indexer with indexer format {keys}",
            f"they contradict each other ({ROWS}={rows}, {INDEXER}={env.get(INDEXER, 'unset')})",
            "drop one",
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
    for name in ("prefill", "backend"):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    if config not in (None, "disabled"):
        raise Refused(f"--cuda-graph-config with prefill backend {config} is not supported", why, "leave prefill out")
    return {"disable_prefill_cuda_graph": True}


def check_config_overrides(args: Any) -> None:
    """Refuses `--json-model-override-args` that reach the layout of the pools or leave the plugin's model."""
    text = _value(args, "json_model_override_args")
    try:
        given = json.loads(text) if isinstance(text, str) else text or {}
    except ValueError:
        given = None
    if not isinstance(given, Mapping):
        raise Refused(f"--json-model-override-args {text}", "it is no JSON object", "pass one, such as '{}'")
    changed = sorted(_LAYOUT_FIELDS & set(given))
    if changed:
        raise Refused(
            f"--json-model-override-args sets {', '.join(changed)}",
            "pools are laid out from config.json itself",
            "change config.json in a copy of the checkpoint's folder",
        )


def check_device(device: str | None) -> None:
    """Refuses a device other than cuda and cpu. None is not known yet."""
    if device is not None and device.split(":", 1)[0] not in ("cuda", "cpu"):
        why = "there are kernels for CUDA and references for the CPU"
        raise Refused(f"--device {device} is not supported", why, "use cuda or cpu")


def check_environment(env: Mapping[str, str]) -> None:
    """Refuses environment switches of the in-tree model that would silently do nothing."""
    for name, why in ENVIRONMENT:
        if env.get(name, "").lower() not in HARMLESS:
            raise Refused(f"{name}={env[name]} has no effect on this model", why, "unset it")
    if env.get(SPLIT, "") not in ("", "moves", "static"):
        why = "memory moves between slots and pages or it does not"
        raise Refused(f"{SPLIT}={env[SPLIT]}", why, "set it to moves or static")


def check_version(installed: str, env: Mapping[str, str] | None = None) -> str | None:
    """Refuses an SGLang that was not tested; returns a warning line where the user allowed it, else None."""
    if installed == TESTED_SGLANG:
        return None
    env = os.environ if env is None else env
    if env.get(ALLOW_UNTESTED) == "1":
        return f"SGLang {installed} is not the tested {TESTED_SGLANG}; going on because {ALLOW_UNTESTED}=1"
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

    `hf_config` is a mapping or a config object. Raises Refused for a checkpoint that the pools cannot hold.
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


_EAGER_ONLY = {
    REFERENCE: "the torch references choose rows on the host",
    CHECK_RANKS: "ranks are compared on the host in every step",
}


def check_cuda(args: Any, env: Mapping[str, str]) -> None:
    """Refuses what the CUDA kernels do not store, and inside CUDA graphs what needs the host within a step."""
    rows, keys = store_format(args, env)
    graphs = not _value(args, "disable_cuda_graph") and _value(args, "cuda_graph_backend_decode") != "disabled"
    for switch, why in _EAGER_ONLY.items():
        if switched_on(switch, env) and graphs:
            raise Refused(f"{switch}=1 with CUDA graphs", f"{why}, which a graph cannot", "add --disable-cuda-graph")
    if switched_on(REFERENCE, env):
        return
    if (rows, keys) not in (("fp8", "fp4"), ("fp8", "fp8")):
        raise Refused(
            f"rows {rows} with indexer keys {keys} on --device cuda",
            "the kernels read FP8 rows and FP4 or FP8 keys",
            f"unset {ROWS} and {INDEXER}, or set {REFERENCE}=1 for the slow torch reference",
        )


def check_weights(hf_config: Any, device: str) -> None:
    """Refuses quantised weights on a CPU, whose model reads float32 and bfloat16 only."""
    quantisation = getattr(hf_config, "quantization_config", None)
    if quantisation and device.startswith("cpu"):
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise Refused(
            f"the checkpoint's weights are quantised ({method})",
            "on a CPU the model reads float32 and bfloat16 weights only",
            "serve it on a GPU, or a checkpoint without quantization_config",
        )


def check_pool_tokens(pool_tokens: int, page: int, also: str = "") -> None:
    """Refuses a page pool that cannot serve a single request.

    A prompt of one page needs three pages: its own, the one its answer starts, and one that SGLang holds back
    at admission; with less the request would wait for ever.
    """
    tokens = ONE_REQUEST_PAGES * page
    if pool_tokens < tokens:
        raise Refused(
            f"the page pool has room for {pool_tokens} tokens",
            f"one request needs {tokens} tokens ({ONE_REQUEST_PAGES} pages){also}",
            f"raise --max-total-tokens to {tokens} or more, or --mem-fraction-static",
        )


def check_pool_slots(state_slots: int, slots_per_request: int, also: str = "") -> None:
    """Refuses a slot pool that cannot serve a single request."""
    if state_slots < slots_per_request:
        raise Refused(
            f"the slot pool has {state_slots} slots",
            f"one request needs {slots_per_request} slots{also}",
            f"raise --max-mamba-cache-size to {slots_per_request} or more, or --mem-fraction-static",
        )


def slots_per_request(args: Any, env: Mapping[str, str]) -> int:
    """Slots that SGLang sets aside for a running request under these flags.

    Without radix cache its own; else two for its snapshots under way, one or two for tracking (two where a step is
    prepared while another runs), and its own.
    """
    if _value(args, "disable_radix_cache"):
        return 1
    kept = 1 if env.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "").lower() in ("1", "true") else 2
    return 1 + kept + (1 if _value(args, "disable_overlap_schedule") else 2)


def check_pool_size(
    *,
    page: int,
    pool_tokens: int,
    state_slots: int,
    slots_per_request: int,
    geometry: Geometry | None = None,
) -> None:
    """Refuses pools that cannot serve a single request, once their sizes are known.

    page               tokens
    pool_tokens        tokens of the page pool
    state_slots        slots that requests can be given, the dummy slot 0 not counted
    slots_per_request  SGLang's ratio: 5 with overlap scheduling, 4 without, 1 without radix cache
    geometry           adds the bytes to the message
    """
    size = ""
    if geometry is not None:
        pages = geometry.page_pool_bytes(ONE_REQUEST_PAGES * page)
        size = f": {pages} B of pages and {geometry.slot_pool_bytes(slots_per_request)} B of slots"
    check_pool_tokens(pool_tokens, page, f" and {slots_per_request} slots{size}")
    check_pool_slots(state_slots, slots_per_request, f" and {ONE_REQUEST_PAGES} pages{size}")


def decide(args: Any, *, device: str | None = None, env: Mapping[str, str] | None = None) -> Decision:
    """Judges the flags (not the model). `device` is the resolved device, where known.

    Returns what SGLang's fields are to be; a value that the user set and that is served stays. Raises Refused
    for the first thing that is not served.
    """
    env = os.environ if env is None else env
    notes: list[str] = []
    device = device or _value(args, "device")
    check_device(device)
    check_environment(env)
    check_config_overrides(args)
    _check_rules(args, RULES)
    if device is not None and device.startswith("cpu"):
        _check_rules(args, CPU_RULES)
    page = page_size(args)
    check_chunk(_value(args, "chunked_prefill_size"), page)
    tokens = _value(args, "max_total_tokens")
    if tokens is not None:
        check_pool_tokens(tokens, page)
    slots = _value(args, "max_mamba_cache_size")
    if slots is not None:
        check_pool_slots(slots, slots_per_request(args, env))
    interval = track_interval(args, page)
    rows, keys = store_format(args, env)
    overrides = {
        "page_size": page,
        "mamba_radix_cache_strategy": "extra_buffer",
        **_attention_backends(args, notes),
    }
    running = _value(args, "max_running_requests")
    if running is not None and running < 1:
        raise Refused(f"--max-running-requests {running}", "no request could run", "use 1 or more")
    context = _value(args, "context_length")
    if context is not None and context < 1:
        raise Refused(f"--context-length {context}", "no request could run", "use 1 or more, or leave the flag out")
    per_path = _value(args, "mamba_max_states_per_path")
    declarations = {
        "mamba_track_interval": interval,
        "mamba_max_states_per_path": DEFAULT_PER_PATH if per_path in (None, -1) else per_path,
        "max_running_requests": DEFAULT_RUNNING if running is None else running,
        **_graphs(args),
    }
    if _value(args, "kv_cache_dtype") == "fp8_e4m3":
        overrides["kv_cache_dtype"] = "auto"  # SGLang's FP8 checks are about pools that do not exist here
        notes.append("--kv-cache-dtype fp8_e4m3 is what the rows store already")
    if _value(args, "enable_deepseek_v4_fp4_indexer"):
        declarations["enable_deepseek_v4_fp4_indexer"] = False  # SGLang would demand Blackwell for its kernel
        notes.append("--enable-deepseek-v4-fp4-indexer is the default here, on every device")
    notes.append(f"rows {rows}, indexer keys {keys}, page {page} tokens, decode snapshot every {interval} tokens")
    return Decision(overrides, declarations, tuple(notes))


def install_excepthook() -> None:
    """From now on an uncaught `Refused` ends the process with its one line instead of a traceback."""
    previous = sys.excepthook
    if getattr(previous, "_sglang_dsv4", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Refused):
            sys.stderr.write(f"sglang-dsv4: {error}\n")
        else:
            previous(kind, error, trace)

    hook._sglang_dsv4 = True  # type: ignore[attr-defined]
    sys.excepthook = hook
