"""Where a ring lies: on the device, in the host's memory beside a GPU, or in files."""

import math
import os
import shutil
import tempfile
import weakref
from typing import Any

import torch
from torch import Tensor

from torchpod.hints import human_bytes
from torchpod.host_memory import available_bytes


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, host: bool, folder: str | None) -> Tensor:
    """Zeros that programs of the device read and write.

    Args:
      shape: of the tensor.
      dtype: of its elements.
      device: where the programs run that use it.
      host: in the host's memory, whatever the device.
      folder: in a file there that has no name any more, so that it is gone when nobody uses it; on a CPU.
    """
    if folder is not None and 0 not in shape:
        handle, path = tempfile.mkstemp(prefix="torchpod-replay-", dir=folder)
        try:
            # Now, for of a file with holes the disk would have to be full in the middle of a run to tell.
            os.posix_fallocate(handle, 0, math.prod(shape) * dtype.itemsize)
            os.close(handle)
            return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
        finally:
            os.unlink(path)
    if host and device.type == "cuda" and 0 not in shape:
        return _seen_by_gpu(torch.zeros(shape, dtype=dtype), device)
    return torch.zeros(shape, dtype=dtype, device=device)


def free_bytes(device: torch.device, host: bool, folder: str | None) -> tuple[float, str]:
    """How much this rank can still have there, and the name of the place."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on this host, each with a ring
    if folder is not None:
        return shutil.disk_usage(folder).free / sharing, folder
    if device.type != "cuda" or host:
        return _free_on_host() / sharing, "cpu"
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached, str(device)


def _free_on_host() -> float:
    try:
        return available_bytes()
    except OSError:  # no Linux
        return math.inf


class _Bytes:
    """Host memory as GPUs are told of theirs (CUDA array interface, version 3)."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        """Kept, as long as somebody looks at it."""
        size = memory.numel() * memory.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _seen_by_gpu(memory: Tensor, device: torch.device) -> Tensor:
    """A tensor of the device, over the same host memory, which is pinned as long as that tensor lives.

    Kernels and captured graphs use it like any other tensor, at the speed of the bus.

    Raises:
      ValueError: if CUDA cannot pin that much.
    """
    runtime, num_bytes = _runtime(), memory.numel() * memory.element_size()
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if failed:
            raise ValueError(
                f"algo.replay.host=true: CUDA cannot pin {human_bytes(num_bytes)} of the host's memory (error "
                f"{failed}); lower algo.replay.capacity, or raise the limit of locked memory (ulimit -l)."
            )
    seen = _Bytes(memory)
    weakref.finalize(seen, _release, memory.data_ptr())
    return torch.as_tensor(seen, device=device).view(memory.dtype).view(memory.shape)


def _release(pointer: int) -> None:
    torch.cuda.synchronize()  # somebody may still be writing
    _runtime().cudaHostUnregister(pointer)


def _runtime() -> Any:
    return torch.cuda.cudart()
