"""``offload_activations``: a checkpoint's inputs wait for their backward in host memory.

Each goes there at its forward, on a stream of its own.  The rank's latest stay on the device,
as many as ``activation_loading_horizon``.  Backward loads as many ahead, in its own order.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from smp import _core
from smp.pytorch import accelerator
from smp.runtime import microbatches
from smp.runtime_state import Runtime
from smp.state_mod import state

_SMALL = 64 << 10  # bytes: such tensors stay


class _Input:
    """A checkpoint's input, saved by autograd.

    Attributes:
        host: its values, once ``written`` has happened.
        tensor: its memory on the device; None: it has none now.
        loaded: the event of the copy into ``tensor``; None: that is the saved tensor.
        microbatch: None: outside of a pipeline.
        before: the input saved before this one in its microbatch.
    """

    def __init__(
        self,
        saved: Tensor,
        host: Tensor,
        written: torch.Event,
        microbatch: int | None,
        before: "weakref.ref[_Input] | None",
    ) -> None:
        self.host, self.written = host, written
        self.microbatch, self.before = microbatch, before
        self.tensor: Tensor | None = saved.detach()
        self.loaded: torch.Event | None = None
        self.place = saved.device, saved.shape, saved.stride()
        self._version = saved._version
        # The version counter of the saved tensor without its memory.
        self._versions = saved.detach()
        self._versions.data = saved.new_empty(0)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor is the saved one, unchanged, and still has the memory here."""
        return (
            self.tensor is not None
            and self.loaded is None
            and self.tensor.data_ptr() == tensor.data_ptr()
            and self.place == (tensor.device, tensor.shape, tensor.stride())
            and self.tensor.dtype == tensor.dtype
            and self._version == tensor._version == self._versions._version
        )

    def refuse_changed(self) -> None:
        """The values here are from before a change of the saved tensor in place.

        Raises:
            RuntimeError: there was one.
        """
        _refuse_changed(self.place[1], self._version, self._versions._version)


class Offloading:
    """The inputs of this rank's checkpoints.

    Args:
        horizon: the most inputs on the device at once.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._streams: dict[torch.device, torch.Stream] = {}
        self._here: list[weakref.ref[_Input]] = []  # inputs with a tensor
        self._given: list[StorageWeakRef] = []  # memory on loan to a backward
        self._last: dict[int | None, weakref.ref[_Input]] = {}  # by microbatch
        # Memory of the side stream's copies under way.
        self._written: deque[tuple[torch.Event, Tensor]] = deque()
        self._loading: list[tuple[torch.Event, Tensor]] = []
        self._pins = True

    # ---------------------------------------------------------------- hooks of autograd

    def pack(self, tensor: Tensor) -> Any:
        """Begin to copy a tensor to the host, where that saves memory."""
        if not _is_worth_it(tensor):
            return tensor, tensor._version
        self._end_copies()
        if (kept := self._kept_already(tensor)) is not None:
            return kept
        host = self._on_host(tensor)
        written = self._copy(tensor.detach(), host, tensor.device)
        self._written.append((written, host))
        microbatch = _core.current()
        made = _Input(tensor, host, written, microbatch, self._last.get(microbatch))
        self._last[microbatch] = weakref.ref(made)
        self._make_room()
        self._here.append(weakref.ref(made))
        if self._count() > self._horizon:  # all others are on their way into a backward
            self._let_go(made)
        return made

    def unpack(self, kept: Any) -> Tensor:
        """The saved tensor, on its device; begins to load the ones before."""
        if isinstance(kept, tuple):
            tensor, version = kept
            _refuse_changed(tensor.shape, version, tensor._version)
            return tensor
        kept.refuse_changed()
        self._end_copies()
        if kept.tensor is None:
            self._make_room(kept.microbatch)
            self._load(kept)
        tensor = kept.tensor
        if kept.loaded is not None:
            torch.accelerator.current_stream(tensor.device).wait_event(kept.loaded)
            self._loading = [each for each in self._loading if each[1] is not tensor]
        self._forget(kept)
        self._given.append(StorageWeakRef(tensor.untyped_storage()))
        self._load_ahead(kept)
        return tensor

    def _kept_already(self, tensor: Tensor) -> _Input | None:
        """A tensor of several checkpoints, as a mask: it stays as the latest."""
        for ref in self._here:
            one = ref()
            if one is not None and one.is_of(tensor):
                self._here.remove(ref)
                self._here.append(ref)
                return one
        return None

    # ---------------------------------------------------------------- of the device

    def _every_here(self) -> list[_Input]:
        return [one for one in (ref() for ref in self._here) if one is not None]

    def _count(self) -> int:
        self._given = [ref for ref in self._given if not ref.expired()]
        return len(self._given) + len(self._every_here())

    def _make_room(self, but: int | None = -1) -> None:
        """For one more: the first saved go, not those loaded for a backward.

        Args:
            but: a microbatch whose inputs stay.
        """
        for one in self._every_here():
            if self._count() < self._horizon:
                return
            if one.loaded is None and one.microbatch != but:
                self._let_go(one)

    def _let_go(self, one: _Input) -> None:
        """The compute stream uses the memory again after the copy out of it."""
        torch.accelerator.current_stream(one.place[0]).wait_event(one.written)
        self._forget(one)

    def _forget(self, one: _Input) -> None:
        one.tensor = one.loaded = None
        self._here = [ref for ref in self._here if ref() is not None and ref() is not one]

    def _load(self, one: _Input) -> None:
        device, shape, strides = one.place
        # Memory of the compute stream, whose earlier uses of it come before the copy.
        tensor = torch.empty_strided(shape, strides, dtype=one.host.dtype, device=device)
        one.tensor, one.loaded = tensor, self._copy(one.host, tensor, device)
        self._loading.append((one.loaded, tensor))
        self._here.append(weakref.ref(one))

    def _load_ahead(self, one: _Input) -> None:
        for _ in range(self._horizon - 1):
            earlier = None if one.before is None else one.before()
            if earlier is None:
                return
            one = earlier
            if one.tensor is None:
                self._make_room(one.microbatch)
                if self._count() >= self._horizon:
                    return
                self._load(one)

    # ---------------------------------------------------------------- copies

    def _copy(self, source: Tensor, target: Tensor, device: torch.device) -> torch.Event:
        """Begin to copy after all work of the compute stream so far.

        Returns:
            the copy's end.
        """
        compute = torch.accelerator.current_stream(device)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.Stream(device)
        side.wait_event(compute.record_event())
        with side:
            target.copy_(source, non_blocking=True)
            return side.record_event()

    def _end_copies(self) -> None:
        """Memory stays until the side stream has used it."""
        while self._written and self._written[0][0].query():
            self._written.popleft()
        self._loading = [each for each in self._loading if not each[0].query()]

    def _on_host(self, tensor: Tensor) -> Tensor:
        if self._pins:
            try:
                return torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError:  # a device without pinned memory
                self._pins = False
        return torch.empty_like(tensor, device="cpu")


def _refuse_changed(shape: torch.Size, saved: int, now: int) -> None:
    """Autograd compares the versions of saved tensors itself, but not of those with hooks."""
    if saved != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: an input of a checkpoint, of shape {list(shape)}, is at "
            f"version {now}; expected version {saved}"
        )


def _is_worth_it(tensor: Tensor) -> bool:
    if tensor.device.type in ("cpu", "meta") or tensor.nbytes < _SMALL:
        return False
    if type(tensor) is not Tensor or isinstance(tensor, nn.Parameter) or tensor.is_conj():
        return False
    if tensor.layout is not torch.strided or not tensor.untyped_storage().resizable():
        return False  # also: memory of the pool
    return not any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


_of_jobs: weakref.WeakKeyDictionary[Runtime, Offloading] = weakref.WeakKeyDictionary()


def of_this_job() -> Offloading | None:
    """The offloading for a checkpoint that begins here; None: its inputs stay.

    Inputs of a checkpoint inside of another are the other's affair.
    """
    if not state.is_initialized or not state.cfg.offload_activations:
        return None
    runtime = state.job("offload_activations").runtime
    is_on_host, is_first = accelerator.in_use() is None, runtime not in _of_jobs
    if is_first:
        _of_jobs[runtime] = Offloading(state.cfg.activation_loading_horizon)
    if is_on_host:
        if is_first:
            warnings.warn(
                "smp: offload_activations=True has no effect: this rank uses no accelerator, "
                "so its activations are in host memory already",
                stacklevel=3,
            )
        return None
    is_inside = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return None if is_inside else _of_jobs[runtime]


def with_tensors_apart(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """A call by its tensors alone: a checkpoint saves no tensors in keywords and containers.

    Returns:
        the function of these tensors, and the tensors.  Its first call has the containers as
        they are, later calls have new ones.
    """
    tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, and its slot

    def slot(tensor: Tensor) -> Tensor:
        _, slot = tensors.setdefault(id(tensor), (tensor, torch.empty(0, device="meta")))
        return slot

    slots = microbatches.map_tensors((args, kwargs), slot)
    places = {id(slot): place for place, (_, slot) in enumerate(tensors.values())}
    first = [(args, kwargs)]

    def call(*given: Tensor) -> Any:
        if first:
            args, kwargs = first.pop()
        else:
            args, kwargs = microbatches.map_tensors(slots, lambda s: given[places[id(s)]])
        return function(*args, **kwargs)

    return call, [tensor for tensor, _ in tensors.values()]
