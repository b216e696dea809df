"""`sglang-dsv4 check`: whether this installation can serve, and what it would use.

Works with whatever is missing: every part is looked at by itself, and what cannot be found is a problem with
its remedy instead of a traceback. A part is not looked at where one that it needs is already a problem.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata

from sglang_dsv4 import __version__
from sglang_dsv4.console import table

GROUP, ENTRY = "sglang.srt.plugins", "sglang_dsv4"


@dataclass
class Report:
    """What was found (subject, finding) and the problems, each "what; remedy" in one line."""

    found: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    device: str = "cpu"

    def problem(self, what: str, remedy: str) -> None:
        self.problems.append(" ".join(f"{what}; {remedy}".split()))

    def text(self) -> str:
        lines = [table(("part", "found"), self.found, left=2)]
        lines += [f"problem: {line}" for line in self.problems]
        lines.append(f"check: problems={len(self.problems)}")
        return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python(report: Report) -> None:
    report.found.append(("python", platform.python_version()))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        report.problem(f"Python {platform.python_version()} is not tested", "use Python 3.11 or 3.12")
    report.found.append(("sglang-dsv4", __version__))


def _torch(report: Report) -> None:
    if importlib.util.find_spec("torch") is None:
        report.found.append(("torch", "missing"))
        report.problem("torch is not installed", "install SGLang, which brings it, or torch==2.13.0 without a GPU")
        return
    import torch

    report.found.append(("torch", torch.__version__))
    if torch.cuda.is_available():
        report.device = "cuda"
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        report.found.append(("device", ", ".join(names)))
    else:
        report.found.append(("device", "cpu (no CUDA device)"))


def _sglang(report: Report) -> bool:
    """Whether SGLang is there at all."""
    from sglang_dsv4 import refusals

    version = _version("sglang")
    if version is None or importlib.util.find_spec("sglang") is None:
        report.found.append(("sglang", f"missing (tested: {refusals.TESTED_SGLANG})"))
        report.problem("SGLang is not installed", f"pip install sglang=={refusals.TESTED_SGLANG}")
        return False
    report.found.append(("sglang", f"{version} (tested: {refusals.TESTED_SGLANG})"))
    try:
        note = refusals.check_version(version)
        if note:
            report.found.append(("note", note))
    except refusals.Refused as refusal:
        report.problems.append(str(refusal))
    return True


def _surroundings(report: Report) -> None:
    entries = {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)}
    report.found.append(("entry point", entries.get(ENTRY, "missing")))
    if ENTRY not in entries:
        report.problem(f"SGLang will not find the plugin: no entry point {ENTRY}", "pip install sglang-dsv4")
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and ENTRY not in allowed:
        report.problem("SGLANG_PLUGINS leaves the plugin out", f"add {ENTRY} to it or unset it")
    if _version("sglang") is None:
        return
    if _version("deepseek-recipe") is None:
        report.problem(
            "deepseek-recipe is not installed and SGLang encodes chats with it",
            "pip install deepseek-recipe==0.2.0",
        )
    if report.device == "cpu":
        if importlib.util.find_spec("sgl_kernel") is None:
            report.problem(
                "SGLang cannot be imported without a GPU: sgl_kernel is missing",
                "put the repository's tools/cpu_shim on PYTHONPATH, as its Makefile does",
            )
        if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
            report.problem("SGLang does not look for a CPU", "set SGLANG_USE_CPU_ENGINE=1")


def _hooks(report: Report) -> None:
    from sglang_dsv4.hooks import HOOKS

    fitting = 0
    for hook in HOOKS:
        line = hook.problem()
        if line:
            report.problems.append(line)
        else:
            fitting += 1
    report.found.append(("hooks", f"{fitting} of {len(HOOKS)} targets have the expected signature"))


def _operations(report: Report) -> None:
    from sglang_dsv4.ops import jit
    from sglang_dsv4.ops.dispatch import operations, reference_forced

    if report.device == "cuda" and not reference_forced():
        try:
            jit.require_tools()
        except jit.KernelBuildError as error:
            report.found.append(("kernels", "cannot be compiled"))
            report.problems.append(" ".join(str(error).split()))
            return
    for name, chosen in operations(report.device).describe().items():
        report.found.append((name, chosen))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Importing SGLang's modules prints warnings about optional packages: they are not about us."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def inspect_installation() -> Report:
    report = Report()
    _python(report)
    _torch(report)
    there = _sglang(report)
    _surroundings(report)
    if importlib.util.find_spec("torch") is not None:
        _guarded(report, "operations", _operations)
    importable = there and (report.device != "cpu" or importlib.util.find_spec("sgl_kernel") is not None)
    if importable:
        _guarded(report, "hooks", _hooks)
    else:
        report.found.append(("hooks", "not checked"))
    return report


def _guarded(report: Report, name: str, part: Callable[[Report], None]) -> None:
    """A part that cannot even be imported is a problem, whatever the reason."""
    try:
        with _quiet():
            part(report)
    except Exception as error:
        report.problem(f"{name} cannot be checked: {type(error).__name__}: {error}", "repair what it names")


def report(say: Callable[[str], None] = print) -> int:
    """Print everything, return the number of problems."""
    result = inspect_installation()
    say(result.text())
    return len(result.problems)
