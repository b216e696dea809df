"""The entry point that SGLang calls in every process it starts: registers, and touches no device.

The parser is registered last: where anything before it fails there is no parser of our name, and SGLang refuses
`--model-config-parser dsv4_slot` instead of serving the in-tree model in its place.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`. Raises RuntimeError, one line, where SGLang does not fit."""
    import sglang

    from sglang_dsv4 import hooks, refusals, server_defaults

    reason = refusals.check_version(sglang.__version__)
    if reason:
        logger.warning("sglang-dsv4: %s", reason)
    mismatches = hooks.problems()
    if mismatches:
        raise RuntimeError(
            f"sglang-dsv4 is not registered: {mismatches[0]} ({len(mismatches)} hooks do not match)"
        )

    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec, register_linear_attn_model
    from sglang.srt.configs.model_config_parser_registry import register_model_config_parser
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dsv4.config import DeepseekV4SlotConfig, SlotConfigParser

    backend_class = "sglang_dsv4.attention.backend.SlotAttentionBackend"
    add_attention_backend_choices([refusals.BACKEND])
    register_attention_backend(refusals.BACKEND)(_make_backend)
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=DeepseekV4SlotConfig,
            backend_class_name=backend_class,
            arch_names=[refusals.ARCHITECTURE],
            support_mamba_cache_extra_buffer=True,
        )
    )
    server_defaults.register()
    hooks.register_hooks()
    register_model_config_parser(refusals.BACKEND)(SlotConfigParser)


def _make_backend(runner):  # type: ignore[no-untyped-def]
    from sglang_dsv4.attention.backend import SlotAttentionBackend

    return SlotAttentionBackend(runner)
