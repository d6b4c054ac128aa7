"""Launch limits that a kernel must be given before use: shared memory past 48 KB, clusters past 8 blocks."""

import functools

import torch

from dsv4.ops.kernels.build import Kernel, KernelBuildError

PORTABLE_CLUSTER = 8
SHARED_BYTES = 227 * 1024  # the most shared memory that a block can have, on sm_90 and sm_100


def cluster_of(blocks: int) -> int:
    """Blocks of a cluster that wants so many: a power of two up to 16, and two at least, since asynchronous stores to a
    cluster of one block are an error to compute-sanitizer."""
    return min(16, max(2, 1 << (blocks - 1).bit_length()))


def raised(kernel: Kernel, shared: int, cluster: int = 1) -> Kernel:
    """The same kernel, allowed on the current device to launch with `shared` bytes and `cluster` blocks a cluster."""
    _raise(kernel, torch.cuda.current_device(), shared, cluster > PORTABLE_CLUSTER)
    return kernel


@functools.cache
def _raise(kernel: Kernel, device: int, shared: int, large_cluster: bool) -> None:
    from cuda.bindings import driver

    names = driver.CUfunction_attribute
    wanted = {names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared}
    if large_cluster:
        wanted[names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
    status, function = driver.cuKernelGetFunction(driver.CUkernel(int(kernel._get(device)._handle)))
    for name, value in wanted.items():
        if status == driver.CUresult.CUDA_SUCCESS:  # another launch of the kernel may need more than this one
            status, allowed = driver.cuFuncGetAttribute(name, function)
            value = max(value, allowed)
        if status == driver.CUresult.CUDA_SUCCESS:
            (status,) = driver.cuFuncSetAttribute(function, name, value)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelBuildError(f"{kernel.function} of {kernel.source} with {kernel.defines}: {wanted} gave {status.name}")
