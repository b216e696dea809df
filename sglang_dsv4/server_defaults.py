"""Applies `refusals` to SGLang's argument resolution.

Two public SGLang registries are used, both before any weight is read:

* a resolution step that runs first in the pipeline, where the record still holds what the user typed. Flags
  are refused here, ahead of SGLang's own asserts about combinations that the user never asked for, and fields
  that a model override may not touch (snapshot interval, request limit, prefill graphs) are declared here;
* the model override of our architecture, where the device and the checkpoint's config are known.

Both apply to servers started with ``--model-config-parser dsv4_slot`` only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from . import refusals
from .refusals import ARCHITECTURE, BACKEND, Refused

log = logging.getLogger(__name__)

FIRST_STEP = "handle_deprecated_dp_attention"  # the first overridable step of SGLang's pipeline


def first_step(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: refuses flags and declares the defaults, then runs SGLang's own step."""
    if server_args.model_config_parser == BACKEND:
        from sglang.srt.arg_groups.overrides import declare_resolution

        # The launcher does not catch what resolution raises: a refusal would be the end of a traceback.
        refusals.install_excepthook()
        decision = refusals.decide(server_args)
        for note in decision.notes:
            log.info("sglang-dsv4: %s", note)
        declare_resolution(server_args, "sglang_dsv4", **decision.overrides, **decision.declarations)
    previous(server_args)


def _cuda_defaults(server_args: Any, cfg: Any) -> dict[str, Any]:
    """What SGLang decides for the in-tree model outside attention by its architecture name.

    The MoE kernels, and on sm_120 the switches that keep in-tree layers off kernels that do not run there.
    Raises Refused on ROCm.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_platform

    platform = get_platform()
    if platform.is_hip:
        raise Refused(
            "this is a ROCm device", "the kernels are CUDA only", "use an NVIDIA GPU or --device cpu"
        )
    if platform.is_sm120:
        for switch, value in (
            (envs.SGLANG_OPT_FP8_WO_A_GEMM, False),
            (envs.SGLANG_OPT_USE_TILELANG_MHC_PRE, False),
            (envs.SGLANG_OPT_FUSE_MHC_POST_PRE, True),
            (envs.SGLANG_OPT_DEEPGEMM_HC_PRENORM, False),
        ):
            if not switch.is_set():
                switch.set(value)
    if cfg.moe_runner_backend != "auto":
        return {}
    model = model_config_of(server_args)
    if model.nvfp4_moe_meta is not None:
        return {"moe_runner_backend": "flashinfer_trtllm_routed"}
    packed = model.is_fp4_experts and not envs.SGLANG_DSV4_FP4_DEQUANT.get()
    if packed and (platform.is_sm90 or platform.is_sm100 or platform.is_sm120):
        return {"moe_runner_backend": "flashinfer_mxfp4"}
    return {}


def _check_compiler() -> None:
    """Raises Refused where the kernels could not be compiled; a device that they do not support is found later."""
    from .ops import dispatch, jit

    if dispatch.reference_forced():
        return
    try:
        jit.require_tools()
    except jit.KernelBuildError as error:
        raise Refused(str(error)) from None


def server_overrides(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Model override for our architecture: judges the checkpoint, returns the fields SGLang lets a model set.

    Raises Refused for flags (again: the device is known now) and for a checkpoint that the pools cannot hold.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    decision = refusals.decide(server_args, device=cfg.device)
    refusals.geometry_of(server_args, hf_config)
    refusals.check_weights(hf_config, cfg.device)
    if cfg.device == "cuda":
        refusals.check_cuda(server_args, os.environ)
        _check_compiler()
        return {**decision.overrides, **_cuda_defaults(server_args, cfg)}
    return decision.overrides


def mark_fp4_experts(raw: dict[str, Any], model_path: str) -> None:
    """Adds to a raw config.json the key by which SGLang knows MXFP4 experts in a checkpoint of any model.

    SGLang looks into DeepSeek-V4 checkpoints for itself, but by architecture name; without the key packed
    experts would be read as FP8. As in-tree, SGLANG_DSV4_FP4_EXPERTS decides where it is set, or where the
    weights cannot be read.
    """
    quantisation = raw.get("quantization_config")
    if not quantisation or quantisation.get("routed_experts_quant_method") is not None:
        return
    from sglang.srt.configs.deepseek_v4 import try_detect_fp4_experts
    from sglang.srt.environ import envs

    packed: bool = envs.SGLANG_DSV4_FP4_EXPERTS.get()
    if not envs.SGLANG_DSV4_FP4_EXPERTS.is_set() or envs.SGLANG_DSV4_FP4_DEQUANT.is_set():
        detected = try_detect_fp4_experts(model_path)
        packed = packed if detected is None else detected
    if packed:
        quantisation["routed_experts_quant_method"] = "mxfp4"


def register() -> None:
    """Registers the step and the override; call once per process, from the plugin's entry point."""
    from sglang.srt.arg_groups.overrides import register_model_override
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(FIRST_STEP)(first_step)
    register_model_override(ARCHITECTURE)(server_overrides)
