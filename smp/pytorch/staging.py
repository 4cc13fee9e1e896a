"""Tensors of an accelerator on their way to another rank: through host memory.

GPUs of one host do without, where they can (``csrc/comm/device``); this module then only
decides on a tensor's place.

The codec (``csrc/python/values``) gives and takes host memory in sight of both ranks.  The
device copies into it and out of it, in the order of its stream.  Neither copy makes the thread
wait: a message waits once for all its tensors, before it is sent, and read memory goes back
after the device's read.
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """A copy where the tensor is, without gaps, with its order of dimensions."""
    return tensor.detach().clone(memory_format=torch.preserve_format)


def unsendable(tensor: Tensor, error: object) -> str:
    """The error's words for a tensor without plain memory to send."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        what, instead = "a tensor inside a transform of torch.func", "call it outside of that"
    elif tensor.is_nested:
        what, instead = "a nested tensor", "pad it (to_padded_tensor), or send its parts"
    elif tensor.is_quantized:
        what, instead = "a quantized tensor", "send tensor.dequantize()"
    elif tensor.layout is not torch.strided:
        what, instead = f"a tensor of layout {tensor.layout}", "send tensor.to_dense()"
    else:
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
        return f"{what} cannot be sent to another rank: {str(error).splitlines()[0]}"
    return (
        f"{what} cannot be sent to another rank: {instead}, or put the module and its caller "
        "on one rank with smp.set_partition"
    )


class Staging:
    """Copies under way between host memory and the devices of this rank.

    Only the thread with the baton calls it, or the main thread between steps.
    """

    def __init__(self) -> None:
        self._writing: set[torch.device] = set()  # devices writing into host memory
        self._reading: deque[tuple[torch.Event, Tensor]] = deque()
        self._homes: list[torch.device] = []

    def live_with(self, tensors: Iterable[Tensor]) -> None:
        """Arriving tensors go to the accelerator of this rank's parameters.

        Where these are on several, with the current one among them, or on none, the tensors go
        to the current one.
        """
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        self._homes = [device for device in devices if device.type not in ("cpu", "meta")]

    def on_device(self) -> bool:
        """Whether arriving tensors go to an accelerator, and their memory back at once."""
        return bool(self._homes)

    def _home(self) -> torch.device | None:
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None or not self._homes:
            return device
        current = torch.device(device.type, torch.accelerator.current_device_index())
        return current if current in self._homes else self._homes[0]

    def out(self, tensor: Tensor, host: Tensor) -> None:
        """Begin to copy the tensor's memory.

        Args:
            tensor: on a device, shape and strides any.
            host: shape ``[n]``, the same dtype: room for the ``n`` elements from the
                tensor's first to its last, as they lie in memory.  It must stay until
                :meth:`wait` returns.
        """
        span = tensor.detach().as_strided((host.numel(),), (1,))
        host.copy_(span, non_blocking=True)
        self._writing.add(tensor.device)

    def wait(self) -> None:
        """Wait for the devices' writes begun by :meth:`out`."""
        writing, self._writing = self._writing, set()
        for device in writing:
            torch.accelerator.current_stream(device).record_event().synchronize()
        self._let_go()

    def into(self, host: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """A new tensor on this rank's device; without one, in host memory.

        Args:
            host: shape ``[n]``: the elements as they shall lie in memory.
            shape: of the result.
            strides: of the result, in elements.
        """
        device = self._home()
        if device is None:
            return host.as_strided(shape, strides).data
        made = host.to(device, non_blocking=True)
        event = torch.accelerator.current_stream(made.device).record_event()
        self._reading.append((event, host))
        self._let_go()
        # .data is no view, and its version is 0: nobody has changed it.
        return made.as_strided(shape, strides).data

    def placed(self, row: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """The tensor of elements already on a device of this rank.

        Args:
            row: shape ``[n]``: the elements as they shall lie in memory.
            shape: of the result.
            strides: of the result, in elements.
        """
        home = self._home()
        if home is not None and home.index is not None:
            row = row.to(home, non_blocking=True)
        return row.as_strided(shape, strides).data

    def _let_go(self) -> None:
        """Give back the memory read by the devices."""
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()

    def end(self) -> None:
        """Wait for everything, and give back all memory held."""
        self.wait()
        while self._reading:
            event, _ = self._reading.popleft()
            event.synchronize()
