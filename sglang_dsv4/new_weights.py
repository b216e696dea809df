"""New weights for a running server (`/update_weights_from_disk`): judged by their headers before one is written.

SGLang rolls back from the folder that did not fit. So what cannot fit must not begin. Where loading fails all the same
nobody knows which weights are in place, and the server ends with one line rather than answer with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dsv4.models.backbone import DRAFT_PREFIX, does_not_fit
from sglang_dsv4.refusals import Refused

INDEX = "model.safetensors.index.json"
_BEGUN = "Failed to update weights"  # how SGLang's answer begins where weights may have been written

Shapes = dict[str, tuple[int, ...]]


def update(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    model_path: str,
    load_format: str,
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, str]:
    """SGLang's `WeightUpdater.update_weights_from_disk`: whether the weights were loaded, and what to tell.

    Raises Refused where some may have been written and loading failed.
    """
    config, model = updater.model_config, updater.get_model()
    before = config.model_path
    if fault := misfit(model_path, load_format, _expected(model, before)):
        return False, f"{model_path} was not loaded: {fault}"
    try:
        done, why = original(updater, model_path, load_format, *args, **kwargs)
        lost = not done and why.startswith(_BEGUN)
    except Exception as error:
        done, why = False, f"{model_path} was not loaded: {error}"
        lost = not hasattr(model, "named_tensors")  # such a model writes all tensors or none
    if lost:
        what = f"the weights of {model_path} did not load, and those before are gone"
        raise Refused(what, why, "start the server again")
    if not done:
        config.model_path = before
    return done, why


def misfit(model_path: str, load_format: str, expected: Shapes) -> str | None:
    """One line where the weights cannot be those of the model, or None. Nothing is known of formats other than
    safetensors, nor without `expected`."""
    from sglang.srt.configs.load_config import LoadFormat

    try:
        LoadFormat(load_format.lower())
    except ValueError:
        return f"{load_format!r} is no load format"
    try:
        found = shapes(Path(model_path))
    except Exception as error:  # safetensors has an error class of its own
        return f"its headers cannot be read ({error})"
    if not found or not expected:
        return None
    faults = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name]),
    }
    return does_not_fit(faults) if any(faults.values()) else None


def shapes(folder: Path) -> Shapes:
    """Of all tensors in a folder's safetensors files, draft layers left out; empty where there are none. Raises what
    reading them raises."""
    from safetensors import safe_open

    index = folder / INDEX
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    found: Shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                if not name.startswith(DRAFT_PREFIX):
                    found[name] = tuple(opened.get_slice(name).get_shape())
    return found


def _expected(model: Any, served: str) -> Shapes:
    """Of the model itself where it has the checkpoint's names, else of the folder that is served."""
    if hasattr(model, "named_tensors"):
        return {name: tuple(tensor.shape) for name, tensor in model.named_tensors().items()}
    try:
        return shapes(Path(served))
    except Exception:  # that folder may be gone by now
        return {}
