"""Compile the CUDA kernels at first use and load them through apache-tvm-ffi.

One shared library per source file of `kernels/`, kept in a per-user cache directory (SGLANG_DSV4_CACHE
overrides it) under a hash of everything that shapes the result: the source, all shared headers, the flags,
the architecture and the versions of the compiler and of tvm-ffi. Processes that race for one library take
turns on a lock file; a finished library appears by an atomic rename, so a killed compiler leaves nothing
that a later run would load.

Every refusal is a `KernelBuildError` of one line that says what to install. Nothing falls back on its own:
the torch reference serves a CUDA device only where SGLANG_DSV4_REFERENCE=1 asks for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "SGLANG_DSV4_CACHE"
MINIMUM_NVCC = (12, 8)  # the first that knows sm_120a
# Compute capability to the target built for it; the suffix a opens the instructions of that generation.
ARCHITECTURES = {
    (8, 0): "80",
    (8, 6): "86",
    (8, 9): "89",
    (9, 0): "90a",
    (10, 0): "100a",
    (10, 3): "103a",
    (12, 0): "120a",
    (12, 1): "121a",
}
_INSTALL = "install CUDA 12.8 or newer, or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl`"
_REFERENCE = "or set SGLANG_DSV4_REFERENCE=1 to run the slow torch reference"


class KernelBuildError(RuntimeError):
    """The kernels cannot be built on this machine; one line says why and what to do."""


def kernels_dir() -> Path:
    """Where the kernel sources lie: `kernels/` of a source tree, or the package's own copy in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package.parent / "kernels", package / "kernels"):
        if (candidate / "include" / "dsv4" / "meta.cuh").is_file():
            return candidate
    raise KernelBuildError(
        f"no kernel sources beside or in {package}: the installation is incomplete; reinstall sglang-dsv4"
    )


def kernel_names() -> list[str]:
    """Names of all kernel sources, sorted."""
    return sorted(path.stem for path in kernels_dir().glob("*.cu"))


def cache_dir() -> Path:
    """Directory of the compiled libraries."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_dsv4" / "kernels"


# Compiler


def _nvcc_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    # NVIDIA's wheels unpack to site-packages/nvidia/cu13 (nvidia/cuda_nvcc before CUDA 13).
    for entry in sys.path:
        for folder in ("cu13", "cuda_nvcc"):
            yield Path(entry or ".") / "nvidia" / folder / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")


@functools.cache
def find_nvcc() -> tuple[Path, str]:
    """Path and version ("13.0.88") of the first nvcc that is new enough. Raises KernelBuildError."""
    rejected = []
    for path in dict.fromkeys(_nvcc_candidates()):
        if not path.is_file():
            continue
        answer = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False)
        match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", answer.stdout)
        if match and (int(match[1]), int(match[2])) >= MINIMUM_NVCC:
            return path, ".".join(match.groups())
        rejected.append(f"{path} is version {'.'.join(match.groups()) if match else 'unknown'}")
    why = "; ".join(rejected) or "none in CUDA_HOME, PATH, NVIDIA's wheels or /usr/local/cuda"
    raise KernelBuildError(f"the CUDA kernels need nvcc 12.8 ({why}): {_INSTALL}, {_REFERENCE}")


@functools.cache
def architecture(device_index: int) -> str:
    """Target of a CUDA device, such as "90a". Raises KernelBuildError for one that is not supported."""
    import torch

    capability = torch.cuda.get_device_capability(device_index)
    if capability not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        name, (major, minor) = torch.cuda.get_device_name(device_index), capability
        raise KernelBuildError(
            f"{name} has compute capability {major}.{minor}: the CUDA kernels support {known}; "
            f"serve on such a device, {_REFERENCE}"
        )
    return ARCHITECTURES[capability]


def _tvm_ffi() -> Any:
    try:
        import tvm_ffi
    except ImportError as error:
        raise KernelBuildError(
            f"the CUDA kernels need apache-tvm-ffi ({error}): `pip install apache-tvm-ffi`, {_REFERENCE}"
        ) from None
    return tvm_ffi


def require_tools() -> None:
    """Raises KernelBuildError where compiler, tvm-ffi or sources are missing."""
    kernels_dir()
    find_nvcc()
    _tvm_ffi()


def compile_command(source: Path, arch: str, output: Path, extra: Sequence[str] = ()) -> list[str]:
    """The nvcc command line that builds one library."""
    nvcc, _ = find_nvcc()
    ffi = _tvm_ffi()
    paths = ffi.libinfo
    includes = [*map(str, dict.fromkeys((paths.find_include_path(), paths.find_dlpack_include_path())))]
    # Before CUDA 13 NVIDIA's wheels keep the runtime's headers and static library in folders of their own.
    toolkit = nvcc.parent.parent
    for sibling in (toolkit.parent / "cuda_runtime", toolkit.parent / "cuda_cccl"):
        if (sibling / "include").is_dir():
            includes.append(str(sibling / "include"))
    libraries = [
        toolkit / "lib",
        toolkit.parent / "cuda_runtime" / "lib",
        Path(paths.find_libtvm_ffi()).parent,
    ]
    return [
        str(nvcc),
        "-std=c++17",
        "-O3",
        "-lineinfo",
        "--shared",
        "-cudart=static",
        "-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=hidden",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        f"-DDSV4_ARCH={int(arch.rstrip('af'))}",
        f"-I{source.parent / 'include'}",
        *(f"-isystem={path}" for path in includes),
        *extra,
        str(source),
        "-o",
        str(output),
        *(f"-L{path}" for path in libraries if path.is_dir()),
        "-ltvm_ffi",
    ]


# Cache


def source_hash(source: Path, arch: str) -> str:
    """Hash of everything that shapes the library, independent of where the sources lie."""
    digest = hashlib.sha256()
    headers = sorted((source.parent / "include").rglob("*.*h"))
    for path in (source, *headers):
        digest.update(path.relative_to(source.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    flags = [f for f in compile_command(source, arch, Path("out")) if f.startswith("-") and "/" not in f]
    digest.update(repr((flags, arch, find_nvcc()[1], _tvm_ffi().__version__)).encode())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive lock between processes and threads; the kernel drops it with a process that dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def compile_to(source: Path, arch: str, output: Path, extra: Sequence[str] = (), log: Path | None = None) -> str:
    """Compile one source to `output` and return what the compiler printed.

    Raises KernelBuildError; the full output then stands in `log` (beside `output` unless named).
    """
    command = compile_command(source, arch, output, extra)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        first = next((line for line in said.splitlines() if "error" in line.lower()), said.strip()[:200])
        log = log or output.with_suffix(".log")
        log.write_text(" ".join(command) + "\n" + said)
        what = f"nvcc failed on {source.name} for sm_{arch}"
        raise KernelBuildError(f"{what}: {first.strip()} (full output: {log})")
    return said


def build(name: str, arch: str) -> Path:
    """Path of the compiled library of `kernels/<name>.cu`, compiled now unless the cache has it."""
    source = kernels_dir() / f"{name}.cu"
    folder = cache_dir()
    library = folder / f"{name}_sm{arch}_{source_hash(source, arch)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if library.is_file():  # another process was faster
                return library
            with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}_") as scratch:
                fresh = Path(scratch) / "fresh.so"
                compile_to(source, arch, fresh, log=library.with_suffix(".log"))
                fresh.replace(library)
    except OSError as error:
        raise KernelBuildError(
            f"cannot write compiled kernels to {folder} ({error.strerror}): set {CACHE_VARIABLE} to a writable folder"
        ) from None
    return library


@functools.cache
def _load(name: str, arch: str) -> Any:
    return _tvm_ffi().load_module(str(build(name, arch)))


def module(name: str, device_index: int) -> Any:
    """The loaded library of `kernels/<name>.cu` for a CUDA device; its exports are attributes.

    torch tensors are passed as they are: tvm-ffi hands over pointers and torch's current stream.
    """
    return _load(name, architecture(device_index))


@functools.cache
def function(name: str, export: str, device_index: int) -> Any:
    """One exported function, cached: what a CUDA face calls."""
    return getattr(module(name, device_index), export)


def build_all(arch: str, names: Sequence[str] | None = None, jobs: int | None = None) -> dict[str, Path]:
    """Compile every kernel (or `names`) for one target ahead of use, several at a time."""
    wanted = list(names or kernel_names())
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        return dict(zip(wanted, pool.map(lambda name: build(name, arch), wanted), strict=True))


def main() -> None:
    """`python -m sglang_dsv4.ops.jit [sm ...]`: fill the cache, by default for this machine's devices."""
    targets = sys.argv[1:]
    if not targets:
        import torch

        targets = sorted({architecture(index) for index in range(torch.cuda.device_count())})
    for arch in targets:
        for name, path in build_all(arch.removeprefix("sm_")).items():
            print(f"{name:18} sm_{arch.removeprefix('sm_'):5} {path}")


if __name__ == "__main__":
    main()
