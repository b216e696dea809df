"""Kernels compile without warnings for every architecture, are cached, and say in one line why they cannot be."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_dsv4 import geometry
from sglang_dsv4.ops import dispatch, jit
from sglang_dsv4.switches import REFERENCE

TARGETS = ("80", "89", "90a", "100a", "120a")


@pytest.fixture
def nvcc() -> Path:
    try:
        return jit.find_nvcc()[0]
    except jit.KernelBuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", jit.kernel_names())
def test_compiles_without_warnings(nvcc, name, target, tmp_path):
    source = jit.kernels_dir() / f"{name}.cu"
    # A clean compile is remembered under a hash of all it depends on: only changed kernels are compiled again.
    # Host code is the same for every target: it is compiled and linked for one of them.
    whole = target == "90a"
    kind = "library" if whole else "cubin"
    stamp = jit.cache_dir() / f"{name}_sm{target}_{jit.source_hash(source, target)}.clean-{kind}"
    if stamp.is_file():
        return
    output = tmp_path / f"{name}.out"
    options = ["-Werror", "all-warnings", "-Xptxas=-v", *([] if whole else ["-cubin"])]
    said = jit.compile_to(source, target, output, options)
    assert "warning" not in said.lower(), said
    assert "serialized" not in said, "every wgmma waits for the one before it (C7510 to C7514)"
    assert not whole or f"__tvm_ffi_{name}".encode() in output.read_bytes()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()


@pytest.fixture
def small_kernel(tmp_path, monkeypatch) -> Path:
    """A kernel folder with one source that compiles quickly, and an empty cache."""
    folder = tmp_path / "kernels"
    (folder / "include" / "dsv4").mkdir(parents=True)
    (folder / "include" / "dsv4" / "value.h").write_text("constexpr int kValue = 7;\n")
    (folder / "answer.cu").write_text(
        '#include "dsv4/value.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return kValue; }\n'
    )
    monkeypatch.setattr(jit, "kernels_dir", lambda: folder)
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path / "cache"))
    return folder


def libraries() -> list[Path]:
    return sorted(jit.cache_dir().glob("*.so"))


def test_a_second_build_comes_from_the_cache(nvcc, small_kernel, monkeypatch):
    first = jit.build("answer", "90a")
    monkeypatch.setattr(jit, "compile_to", lambda *_, **__: pytest.fail("compiled again"))
    assert jit.build("answer", "90a") == first


def test_a_changed_header_or_target_is_another_library(nvcc, small_kernel):
    source = small_kernel / "answer.cu"
    first = jit.source_hash(source, "90a")
    assert jit.source_hash(source, "80") != first
    (small_kernel / "include" / "dsv4" / "value.h").write_text("constexpr int kValue = 8;\n")
    assert jit.source_hash(source, "90a") != first


def test_racing_threads_and_processes_compile_once(nvcc, small_kernel, monkeypatch):
    compiled = []
    real = jit.compile_to

    def counted(*arguments, **options):
        compiled.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(jit, "compile_to", counted)
    threads = [threading.Thread(target=jit.build, args=("answer", "90a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and len(libraries()) == 1
    assert not list(jit.cache_dir().glob(".answer*")), "scratch folders are left behind"

    library = libraries()[0]
    made = library.stat().st_mtime_ns
    code = (
        "import sys, pathlib\nfrom sglang_dsv4.ops import jit\n"
        "jit.kernels_dir = lambda: pathlib.Path(sys.argv[1])\nprint(jit.build('answer', '90a'))\n"
    )
    root = Path(jit.__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    others = [
        subprocess.Popen([sys.executable, "-c", code, str(small_kernel)], stdout=subprocess.PIPE, env=env, text=True)
        for _ in range(2)
    ]
    assert {p.communicate()[0].strip() for p in others} == {str(library)}
    assert library.stat().st_mtime_ns == made


def test_a_broken_kernel_is_one_line_and_leaves_a_log(nvcc, small_kernel):
    (small_kernel / "answer.cu").write_text("int answer() { return missing; }\n")
    with pytest.raises(jit.KernelBuildError, match=r"nvcc failed on answer\.cu for sm_90a.*missing") as caught:
        jit.build("answer", "90a")
    assert "\n" not in str(caught.value)
    log = Path(re.search(r"full output: (.*)\)", str(caught.value))[1])
    assert "missing" in log.read_text()
    assert not libraries()


def test_an_unwritable_cache_names_the_variable(nvcc, small_kernel, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(blocked / "cache"))
    with pytest.raises(jit.KernelBuildError, match=jit.CACHE_VARIABLE):
        jit.build("answer", "90a")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "_nvcc_candidates", lambda: iter([tmp_path / "nvcc"]))
    jit.find_nvcc.cache_clear()
    with pytest.raises(jit.KernelBuildError, match=r"need nvcc 12\.8.*install CUDA 12\.8.*=1") as caught:
        jit.find_nvcc()
    assert "\n" not in str(caught.value)
    jit.find_nvcc.cache_clear()


def test_an_old_compiler_is_named(monkeypatch, tmp_path):
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.1, V12.1.105'\n")
    old.chmod(0o755)
    monkeypatch.setattr(jit, "_nvcc_candidates", lambda: iter([old]))
    jit.find_nvcc.cache_clear()
    with pytest.raises(jit.KernelBuildError, match=r"is version 12\.1\.105"):
        jit.find_nvcc()
    jit.find_nvcc.cache_clear()


def test_an_unsupported_device_is_named(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    jit.architecture.cache_clear()
    with pytest.raises(jit.KernelBuildError, match=r"Tesla T4 has compute capability 7\.5.*REFERENCE=1"):
        jit.architecture(0)
    jit.architecture.cache_clear()


def test_a_missing_compiler_does_not_fall_back_silently(monkeypatch):
    def missing():
        raise jit.KernelBuildError("no nvcc")

    monkeypatch.setattr(jit, "find_nvcc", missing)
    monkeypatch.delenv(REFERENCE, raising=False)
    dispatch.operations.cache_clear()
    with pytest.raises(jit.KernelBuildError):
        dispatch.operations("cuda")
    monkeypatch.setenv(REFERENCE, "1")
    assert not any("cuda" in name for name in dispatch.operations("cuda").describe().values())
    dispatch.operations.cache_clear()


def test_the_cuda_faces_serve_cuda_and_the_references_serve_the_cpu(nvcc, monkeypatch):
    monkeypatch.delenv(REFERENCE, raising=False)
    dispatch.operations.cache_clear()
    cuda, cpu = dispatch.operations("cuda").describe(), dispatch.operations("cpu").describe()
    assert not any(face.endswith("_cuda") for face in cpu.values())
    assert all(face.endswith("_cuda") for face in cuda.values())


def test_layout_constants_are_those_of_geometry():
    text = (jit.kernels_dir() / "include" / "dsv4" / "rows.cuh").read_text()
    constants = {"kWindow": geometry.WINDOW, "kHeadDim": geometry.HEAD_DIM, "kRopeDim": geometry.ROPE_DIM}
    constants |= {"kIndexDim": geometry.INDEX_DIM, "kCsaRatio": geometry.CSA_RATIO}
    constants |= {"kHcaRatio": geometry.HCA_RATIO, "kGroupRows": geometry.GROUP_ROWS}
    constants |= {"kFp8Quant": geometry.FP8_QUANT, "kFp4Quant": geometry.FP4_QUANT}
    for name, value in constants.items():
        assert re.search(rf"constexpr int {name} = {value};", text), name
    known = {"kIndexDim": geometry.INDEX_DIM, "kNopeDim": geometry.NOPE_DIM, "kRopeDim": geometry.ROPE_DIM}
    for struct, layout in (
        ("MainFp8", geometry.MAIN_FP8),
        ("IndexFp4", geometry.INDEX_FP4),
        ("IndexFp8", geometry.INDEX_FP8),
    ):
        body = re.search(rf"struct {struct} \{{(.*?)\}};", text, re.S)[1]
        for field, value in (("kDataBytes", layout.data_bytes), ("kScaleBytes", layout.scale_bytes)):
            expression = re.search(rf"{field} = ([^;]+);", body)[1].replace("/", "//")
            assert eval(expression, {}, known) == value, (struct, field)


def test_hash_is_independent_of_where_the_sources_lie(nvcc, small_kernel, tmp_path):
    import shutil

    elsewhere = shutil.copytree(small_kernel, tmp_path / "elsewhere")
    here = jit.source_hash(small_kernel / "answer.cu", "90a")
    assert jit.source_hash(elsewhere / "answer.cu", "90a") == here
    assert len(hashlib.sha256(here.encode()).digest()) == 32
