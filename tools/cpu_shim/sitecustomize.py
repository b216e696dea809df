"""Lets torchvision import beside a CPU build of torch: see README.md in this folder."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(MetaPathFinder):
    """Finds nothing: it only sees the first import of torchvision go by."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                for operator in ("nms", "qnms"):
                    torch.library.define(f"torchvision::{operator}", _BOXES)
        return None


sys.meta_path.insert(0, _DeclareOperators())
