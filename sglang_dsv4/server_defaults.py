"""Applies `refusals` to SGLang's argument resolution.

Two public SGLang registries are used, both before any weight is read:

* a resolution step that runs first in the pipeline, where the record still holds what the user typed.  Refusals of
  flags come out here, ahead of SGLang's own asserts about combinations that the user never asked for, and fields that
  a model override may not touch (snapshot interval, request limit, prefill graphs) are declared here;
* the model override of our architecture, where the device and the checkpoint's config are known.

Both apply to servers started with ``--model-config-parser dsv4_slot`` only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from . import refusals
from .refusals import ARCHITECTURE, BACKEND, Refused

log = logging.getLogger(__name__)

FIRST_STEP = "handle_deprecated_dp_attention"  # the first overridable step of SGLang's pipeline


def _refusing(error: Refused) -> Refused:
    # The launcher does not catch what resolution raises: without this the line would end a traceback.
    sys.excepthook = refusals.excepthook(sys.excepthook)
    return error


def first_step(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: refuses flags and declares the defaults, then runs SGLang's own step."""
    if server_args.model_config_parser == BACKEND:
        from sglang.srt.arg_groups.overrides import declare_resolution

        try:
            decision = refusals.decide(server_args)
        except Refused as error:
            raise _refusing(error) from None
        for note in decision.notes:
            log.info("sglang-dsv4: %s", note)
        declare_resolution(server_args, "sglang_dsv4", **decision.overrides, **decision.declarations)
    previous(server_args)


def _moe_runner(server_args: Any, cfg: Any) -> dict[str, str]:
    """The in-tree model's own choice of MoE kernels, which SGLang makes for its architecture name only."""
    if cfg.device != "cuda" or cfg.moe_runner_backend != "auto":
        return {}
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_platform

    model, platform = model_config_of(server_args), get_platform()
    if model.nvfp4_moe_meta is not None:
        return {"moe_runner_backend": "flashinfer_trtllm_routed"}
    if (
        model.is_fp4_experts
        and not envs.SGLANG_DSV4_FP4_DEQUANT.get()
        and (platform.is_sm90 or platform.is_sm100 or platform.is_sm120)
    ):
        return {"moe_runner_backend": "flashinfer_mxfp4"}
    return {}


def server_overrides(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Model override for our architecture: judges the checkpoint and returns the fields SGLang lets a model set.

    Raises Refused for flags (again: the first step may not have run) and for a checkpoint the pools cannot hold.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    try:
        decision = refusals.decide(server_args, device=cfg.device)
        refusals.geometry_of(server_args, hf_config)
    except Refused as error:
        raise _refusing(error) from None
    return {**decision.overrides, **_moe_runner(server_args, cfg)}


def register() -> None:
    """Registers the step and the override; call once per process, from the plugin's entry point."""
    from sglang.srt.arg_groups.overrides import register_model_override
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(FIRST_STEP)(first_step)
    register_model_override(ARCHITECTURE)(server_overrides)
