"""Compile the CUDA sources beside this file with NVRTC, cache the cubins on disk, launch them on PyTorch's stream.

Users need no nvcc: NVRTC, cuda.core and the CUDA headers come as wheels (`pip install dsv4[cuda]`) or with a toolkit. A
kernel is compiled on first use (0.1 to 1 s) and kept under ~/.cache/dsv4/kernels, keyed by its source with everything it
includes, its options, the architecture and the compiler's version. Writing there is atomic, so several processes may
compile the same kernel at once.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers a thread, shared memory a block, and what of a thread lies in local memory,
    by spilled registers or as an array that is indexed at run time."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int


class KernelBuildError(RuntimeError):
    """No compiler, no headers, or a source that does not compile. A kernel that cannot run says so."""


def include_folders() -> list[str]:
    """Folders that hold the CUDA headers; KernelBuildError if there is none."""

    def candidates() -> Iterator[Path]:
        spec = importlib.util.find_spec("nvidia")
        for root in spec.submodule_search_locations if spec else ():
            yield from sorted(Path(root).glob("*/include"), reverse=True)
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            if variable in os.environ:
                yield Path(os.environ[variable]) / "include"
        nvcc = shutil.which("nvcc")
        if nvcc:
            yield Path(nvcc).resolve().parent.parent / "include"
        yield Path("/usr/local/cuda/include")

    for folder in candidates():
        if (folder / "cuda_bf16.h").exists() and (folder / "cuda_fp8.h").exists():
            return [str(folder)]
    raise KernelBuildError(
        "no CUDA headers (cuda_bf16.h, cuda_fp8.h) found in the nvidia wheels, CUDA_HOME or /usr/local/cuda; "
        "install them with: pip install 'dsv4[cuda]'"
    )


def read_source(name: str) -> str:
    """The text of a source file with its local includes put in place, so that one string is all that is compiled."""
    text = (SOURCES / name).read_text()
    return _INCLUDE.sub(lambda match: read_source(match.group(1)), text)


def _nvrtc():
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise KernelBuildError(
            f"dsv4's CUDA kernels need cuda-core and NVRTC ({error}); install them with: pip install 'dsv4[cuda]'"
        ) from error
    return nvrtc, Program, ProgramOptions


@functools.cache
def _nvrtc_version() -> str:
    nvrtc, _, _ = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def compile_cubin(source: str, arch: str, defines: tuple[str, ...] = ()) -> tuple[bytes, dict[str, Resources]]:
    """Compile the file `source` for `arch` ("sm_90a") with `defines` ("HEADS=64"); needs no GPU.

    Returns the cubin and each kernel's resources. Raises KernelBuildError with the compiler's own text.
    """
    _, program, options = _nvrtc()

    class Log:
        text = ""

        def write(self, message: str) -> None:
            self.text += message

    log = Log()
    try:
        code = program(
            read_source(source),
            "c++",
            options(
                std="c++17",
                arch=arch,
                include_path=include_folders(),
                # cuda.core refuses an empty list
                define_macro=[tuple(item.split("=", 1)) if "=" in item else item for item in defines] or None,
                ptxas_options=["-v"],
            ),
        ).compile("cubin", logs=log)
    except Exception as error:
        raise KernelBuildError(f"{source} does not compile for {arch} with {defines}:\n{log.text}\n{error}") from error
    return bytes(code.code), _resources(log.text)


def _resources(log: str) -> dict[str, Resources]:
    found = {}
    for name, body in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", log, re.DOTALL):
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", body))
        stack = sum(int(n) for n in re.findall(r"(\d+) bytes stack frame", body))
        registers = re.search(r"Used (\d+) registers", body)
        shared = re.search(r"(\d+) bytes smem", body)
        found[name] = Resources(int(registers.group(1)), int(shared.group(1)) if shared else 0, spills, stack)
    return found


def cache_folder() -> Path:
    """Where cubins are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dsv4" / "kernels"


def cached_cubin(source: str, arch: str, defines: tuple[str, ...]) -> bytes:
    """The cubin from disk, compiled and put there first if it is not."""
    key = "\0".join((read_source(source), arch, *defines, _nvrtc_version()))
    path = cache_folder() / f"{Path(source).stem}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin, _ = compile_cubin(source, arch, defines)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(cubin)
    os.replace(aside, path)
    return cubin


@functools.cache
def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.cache
def _stream(handle: int):
    # Wrapping a raw stream costs 11 us, so each is wrapped once.
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _divide_as_all_others(loaded, device: int) -> None:
    """Let a kernel have as much of a multiprocessor's memory as shared memory as there is.

    Otherwise each launch gets the division that suits it, and a multiprocessor that has to change its division waits until
    it is empty: the next kernel's blocks then cannot begin beside the ones that run (measured on an H200: 2 us a launch).
    """
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (status,) = driver.cuKernelSetAttribute(attribute, 100, driver.CUkernel(int(loaded._handle)), driver.CUdevice(device))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelBuildError(f"setting the shared memory carveout of a kernel gave {status.name}")


class Kernel:
    """One kernel function of one source, compiled for the current device on first launch."""

    def __init__(self, source: str, function: str, defines: tuple[str, ...] = ()):
        self.source, self.function, self.defines = source, function, defines
        self._loaded: dict[int, object] = {}

    def _get(self, device: int):
        if device not in self._loaded:
            from cuda.core import Device, ObjectCode

            Device(device).set_current()
            code = ObjectCode.from_cubin(cached_cubin(self.source, _arch(device), self.defines))
            loaded = code.get_kernel(self.function)
            _divide_as_all_others(loaded, device)
            self._loaded[device] = (code, loaded)
        return self._loaded[device][1]

    def __call__(self, grid: tuple | int, block: tuple | int, *args, shared: int = 0, cluster=None, pdl: bool = False):
        """Launch on the current stream. Tensors pass their address, int 32 bits, float 32 bits, None a null pointer.

        shared: bytes of dynamic shared memory. cluster: thread-block cluster shape; grid then counts clusters.
        pdl: programmatic dependent launch; the kernel must then execute griddepcontrol.wait before it reads results.
        """
        from cuda.core import LaunchConfig, launch

        kernel = self._get(torch.cuda.current_device())
        extra = {"cluster": cluster} if cluster is not None else {}
        if pdl:
            extra["programmatic_stream_serialization"] = True
        config = LaunchConfig(grid=grid, block=block, shmem_size=shared, **extra)
        launch(_stream(torch.cuda.current_stream().cuda_stream), config, kernel, *map(_argument, args))


def _argument(value):
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, bool) or value is None:
        return ctypes.c_int(int(value)) if value is not None else 0
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


@functools.cache
def kernel(source: str, function: str, *defines: str) -> Kernel:
    """The kernel `function` (extern "C") of the file `source`, compiled with `defines` such as "HEADS=64"."""
    return Kernel(source, function, defines)
