"""``smp.memory_report()``: the bytes of each rank, by kind."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from smp import _core, ranks
from smp.collectives import objects
from smp.data_parallel.buckets import memory_of_buckets
from smp.modules import live_models
from smp.precision import masters
from smp.pytorch import accelerator
from smp.runtime import failures
from smp.sharding.shards import gradient_of
from smp.state_mod import state


@dataclass
class Bytes:
    """The bytes of one rank on one device.  Memory shared by two kinds counts as the first.

    Attributes:
        rank: global.
        device: ``"cpu"`` is the rank's process, others are its accelerators.
        gradients: those of ``.grad``, and the terms of a step under way.
        buckets: of the exchange between replicas; see ``bucket_cap_mb``.
        masters: float32 weights of half parameters.
        optimizer_state: of wrapped optimizers.
        kept_outputs: of calls without the caller, for a caller that may still fetch them.
        pool: on the host shared memory touched by this process; else the device pool.
        holes: memory without a tensor, kept by malloc or the device's allocator.
        rest: on the host Python, code, and all tensors of no kind above: those saved by
            autograd, an optimizer that is not wrapped, the data.
        in_use: all of these; on the host the resident set.
        peak: the most in use since the start or a reset.
    """

    rank: int
    device: str
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    buckets: int = 0
    masters: int = 0
    optimizer_state: int = 0
    kept_outputs: int = 0
    pool: int = 0
    holes: int = 0
    rest: int = 0
    in_use: int = 0
    peak: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{_words(kind)} {getattr(self, kind) >> 20} MiB" for kind in _KINDS)


_KINDS = tuple(field.name for field in fields(Bytes) if field.type is int)[1:]
_OF_TENSORS = _KINDS[: _KINDS.index("pool")]


@dataclass(frozen=True)
class MemoryReport:
    """The memory of ranks; ``print`` shows a table.

    Attributes:
        every: by rank, then by device, the host first.
    """

    every: tuple[Bytes, ...]

    def __str__(self) -> str:
        rows = [("rank", "device", *map(_words, _KINDS))]
        rows += [
            (str(one.rank), one.device, *(f"{getattr(one, k) / (1 << 20):.1f}" for k in _KINDS))
            for one in self.every
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.rjust, row, widths)) for row in rows)
        return "\n".join(("memory in MiB", *lines))


def memory_report(everyone: bool = False, reset_peak: bool = False) -> MemoryReport:
    """The bytes of this rank's parameters, gradients, optimizer state and so on.

    Args:
        everyone: of all ranks.  Then the call is collective over all ranks.
        reset_peak: later peaks count from here.

    Raises:
        RuntimeError: before ``smp.init``.
    """
    state.job("smp.memory_report()")
    here = _of_this_rank()
    if reset_peak:
        _reset_peak()
    if not everyone:
        return MemoryReport(here)
    return MemoryReport(tuple(b for of in objects.allgather(here, ranks.WORLD) for b in of))


def tell_if_out_of_memory(error: BaseException) -> None:
    """Give an error of this rank without memory a note, with the bytes of each kind."""
    if not failures.is_out_of_memory(error) or failures.told_of(error) is not None:
        return
    who = f"memory of {state.job('smp.memory_report()').runtime.name}"
    # An error of the report's own, also for lack of memory, would take this one's place.
    with suppress(Exception):
        _add_notes(error, who)


def _add_notes(error: BaseException, who: str) -> None:
    for one in _of_this_rank():
        failures.add_note(
            error, f"{who}{'' if one.device == 'cpu' else f' on {one.device}'}: {one}"
        )


def _of_this_rank() -> tuple[Bytes, ...]:
    found = {"cpu": Bytes(ranks.rank(), "cpu")}
    seen: set[tuple[str, int]] = set()
    for kind, tensors in _tensors().items():
        for tensor in tensors:
            for device, address, size in _storages(tensor):
                if (device, address) in seen:
                    continue
                seen.add((device, address))
                one = found.setdefault(device, Bytes(ranks.rank(), device))
                setattr(one, kind, getattr(one, kind) + size)
    _measure_host(found["cpu"])
    if (kind_of_device := accelerator.in_use()) is not None:
        place = torch.device(kind_of_device.type, torch.accelerator.current_device_index())
        _measure_device(found.setdefault(str(place), Bytes(ranks.rank(), str(place))), place)
    return tuple(found.values())


def _tensors() -> Mapping[str, Iterable[Tensor | None]]:
    models = live_models.living()
    parameters = [p for model in models for p in model.local_parameters()]
    half = [master for each in masters.every() for master in each.every()]
    return {
        "parameters": parameters,
        "buffers": (buffer for model in models for buffer in model.local_buffers()),
        "gradients": (*map(gradient_of, parameters), *_core.gradients_taken()),
        "buckets": memory_of_buckets(),
        "masters": half,
        "optimizer_state": _inside([each.optimizer.state for each in masters.every()]),
        "kept_outputs": _inside(_core.kept_outputs()),
    }


def _inside(value: Any) -> Iterator[Tensor]:
    """The tensors in containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _inside(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for one in value:
            yield from _inside(one)


def _storages(tensor: Tensor | None) -> Iterator[tuple[str, int, int]]:
    """Device, address and bytes; none of other processes' memory."""
    if tensor is None or tensor.device.type == "meta":
        return
    if tensor.is_sparse:
        yield from _storages(tensor._indices())
        yield from _storages(tensor._values())
        return
    with suppress(NotImplementedError, RuntimeError):  # subclasses without memory of their own
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" or storage.resizable():
            yield str(storage.device), storage.data_ptr(), storage.nbytes()


# ---------------------------------------------------------------- measured


def _measure_host(one: Bytes) -> None:
    resident = _from_status()
    one.pool = resident.get("RssShmem", 0)
    one.in_use = resident.get("VmRSS", 0)
    one.peak = max(one.in_use, resident.get("VmHWM", 0))
    one.holes = max(0, _core.heap_holes() - _given_back())
    _rest(one)


def _measure_device(one: Bytes, place: torch.device) -> None:
    one.pool = _core.counters().get("device_size", 0)
    allocated = _of_device(place, "memory_allocated")
    reserved = max(allocated, _of_device(place, "memory_reserved"))
    counted = sum(getattr(one, kind) for kind in _OF_TENSORS)
    one.holes = reserved - allocated
    one.in_use = one.pool + max(reserved, counted)
    one.peak = max(one.in_use, one.pool + _of_device(place, "max_memory_reserved"))
    _rest(one)


def _rest(one: Bytes) -> None:
    counted = sum(getattr(one, kind) for kind in (*_OF_TENSORS, "pool", "holes"))
    one.rest = max(0, one.in_use - counted)


def _of_device(place: torch.device, name: str) -> int:
    """A count of PyTorch's module for a kind of device; 0: it has no such count."""
    count: Callable[..., int] | None = getattr(torch.get_device_module(place), name, None)
    return 0 if count is None else count(place)


def _from_status() -> dict[str, int]:
    """Bytes by name of ``/proc/self/status``, as proc(5) has them."""
    try:
        with open("/proc/self/status") as status:
            lines = [line.split() for line in status]
    except OSError:
        return {}
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def _given_back() -> int:
    """Bytes of the heap without a page, as after ``malloc_trim(0)``.

    A forked process has its parent's part of the heap as one mapping and the rest as another.
    """
    bytes_without, of_heap = 0, False
    try:
        with open("/proc/self/smaps") as maps:
            for line in maps:
                words = line.split()
                if not words[0].endswith(":"):
                    of_heap = words[-1] == "[heap]"
                elif of_heap and words[0] == "Size:":
                    bytes_without += int(words[1]) << 10
                elif of_heap and words[0] == "Rss:":
                    bytes_without -= int(words[1]) << 10
    except OSError:
        return 0
    return bytes_without


def _reset_peak() -> None:
    with suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    if (device := accelerator.in_use()) is not None:
        reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
        if reset is not None:
            reset()


def _words(kind: str) -> str:
    return kind.replace("_", " ")
