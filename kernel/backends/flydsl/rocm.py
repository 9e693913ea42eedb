"""A gfx950 under ROCm, as PyTorch sees it: where launches go on real hardware."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from kernel.backends.flydsl.runtime import TARGET
from kernel.errors import DeviceUnavailableError


class RocmDevice:
    """One GPU; see :class:`kernel.backends.flydsl.runtime.Device`.

    Args:
        torch_device: ``cuda`` or ``cuda:n``, as a ROCm build of PyTorch names its devices.

    Raises:
        DeviceUnavailableError: no ROCm build of PyTorch, no such GPU, or not a gfx950.
    """

    def __init__(self, torch_device: torch.device) -> None:
        if torch.version.hip is None:
            raise DeviceUnavailableError(
                f"PyTorch {torch.__version__} is not a ROCm build", "install PyTorch for ROCm 7"
            )
        if not torch.cuda.is_available():
            raise DeviceUnavailableError(
                "PyTorch sees no AMD GPU", "check rocm-smi, and the access to /dev/kfd and /dev/dri"
            )
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailableError(
                f"{torch_device} does not exist, {torch.cuda.device_count()} GPUs do", "use one of them"
            )
        properties = torch.cuda.get_device_properties(index)
        architecture = str(properties.gcnArchName).split(":")[0]
        if architecture != TARGET:
            raise DeviceUnavailableError(
                f"cuda:{index} is a {architecture}, and the kernels are for {TARGET} (MI350X, MI355X)",
                "use another backend",
            )
        self.torch_device = torch.device("cuda", index)
        self.compute_units = int(properties.multi_processor_count)

    def prepare(self) -> None:
        """Nothing is left to do: PyTorch has loaded HIP."""

    def stream(self) -> int:
        """PyTorch's current stream on this GPU."""
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    @contextmanager
    def registered(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Launches inside go to this GPU: FlyDSL loads and launches on whichever is current."""
        del tensors  # the hardware maps every allocation
        with torch.cuda.device(self.torch_device):
            yield

    def take_failure(self) -> BaseException | None:
        """None: HIP's error codes say everything."""
        return None
