"""The operators of a traced run: their uses, results, draws and writes.

The recorder (``smp/partitioning/tracing.py``) knows the running modules.  On meta tensors the
operators' arguments are replaced here.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smp.partitioning import traced_tensors
from smp.pytorch.restore import Restore


class Frame(Protocol):
    """A `smp.partitioning.tracing.Frame`, as operators know it."""

    @property
    def number(self) -> int: ...
    @property
    def used(self) -> set[int]: ...


class Recorder(Protocol):
    """A `smp.partitioning.tracing.Recorder`, as operators know it."""

    meta: bool
    memory_of: dict[int, int]
    parameter: dict[int, int]
    records: list[Any]  # ModuleTrace, by number
    restore: Restore
    written: set[int]

    @property
    def frames(self) -> Sequence[Frame]: ...
    def hear_collective(self, group: Any) -> None: ...


def _place_of_group(schema: Any) -> tuple[int, str] | None:
    """The argument with the group of a collective of torch.distributed; None: no collective."""
    if "c10d" in schema.name.partition("::")[0]:
        for place, argument in enumerate(schema.arguments):
            if argument.name in ("process_group", "group_name"):
                return place, argument.name
    return None


def _group_of(place: tuple[int, str], args: tuple, kwargs: dict) -> dist.ProcessGroup:
    position, name = place
    group = args[position] if position < len(args) else kwargs[name]
    if not isinstance(group, str):
        group = dist.ProcessGroup.unbox(group).group_name
    return dist.distributed_c10d._resolve_process_group(group)


class _Kind:
    """An operator's schema, looked up once."""

    __slots__ = ("flops", "fresh", "group", "random", "writes")

    def __init__(self, func: Any):
        schema = func._schema
        self.fresh = any(r.alias_info is None for r in schema.returns)
        self.writes = [
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.group = _place_of_group(schema)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.flops = flop_registry.get(func.overloadpacket)
        # PyTorch does not count this operator on CPUs, nor fewer heads of keys in each version.
        if func.overloadpacket.__name__.startswith("_scaled_dot_product_"):
            self.flops = _attention_flops


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> int:
    """Those of attention; q [samples, heads, queries, columns], k and v likewise."""
    samples, heads, queries, columns = q.shape
    return 2 * samples * heads * queries * k.shape[-2] * (columns + v.shape[-1])


def _flops(formula: Any, args: tuple, kwargs: dict, output: Any) -> int:
    """0 where they are not known: formulas know usual arguments alone."""
    try:
        return int(formula(*args, **kwargs, out_val=output))
    except Exception:  # noqa: BLE001 - it is an estimate
        return 0


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _call(func: Any, args: tuple, kwargs: dict) -> Any:
    return func(*args, **kwargs)


class Operators(TorchDispatchMode):
    """Sees every operator below autograd: arguments, results, draws, writes."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        self.kinds: dict[Any, _Kind] = {}
        self.own: set[int] = set()  # storages made during the run
        self.valued: set[int] = set()  # ... by _made_on_meta, with values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load dynamo (two seconds) only to keep it away from this mode.

        Compiled code never meets this mode.
        """
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        kind = self.kinds.get(func)
        if kind is None:
            kind = self.kinds[func] = _Kind(func)
        recorder = self.recorder
        frame = recorder.frames[-1]
        if kind.group is not None:
            recorder.hear_collective(_group_of(kind.group, args, kwargs))
        self._note_parameters(frame, args)
        if kwargs:
            self._note_parameters(frame, kwargs.values())
        if kind.writes:
            self._keep_written(kind, args, kwargs)
        if recorder.meta:
            args, kwargs, written = self._to_meta(args, kwargs)
        call = self._run_random if kind.random else _call
        if recorder.meta and not kind.random and _is_meta(kwargs.get("device")):
            call = self._made_on_meta
        output = call(func, args, kwargs)
        if kind.flops is not None and frame.number >= 0:
            recorder.records[frame.number].flops += _flops(kind.flops, args, kwargs, output)
        if kind.fresh:
            self._count(frame, output)
        elif kind.writes and recorder.meta and written is not None:
            if written.untyped_storage()._cdata in self.valued:
                raise RuntimeError(f"{func} writes what is not known into integers or bools")
            return written
        return output

    def _note_parameters(self, frame: Frame, values: Any) -> None:
        parameters = self.recorder.parameter
        for value in values:
            parameter = parameters.get(id(value))
            if parameter is not None:
                frame.used.add(parameter)
            elif type(value) in (list, tuple):
                self._note_parameters(frame, value)
            elif isinstance(value, Tensor):
                parameter = self._whose_data(value)
                if parameter is not None:
                    frame.used.add(parameter)

    def _whose_data(self, tensor: Tensor) -> int | None:
        """The id of the parameter ``p`` where the tensor is ``p.data``, unknown to autograd."""
        if tensor.requires_grad or tensor.layout is not torch.strided or tensor._is_view():
            return None
        try:
            return self.recorder.memory_of.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # no storage
            return None

    def _note_written(self, tensor: Tensor) -> None:
        """A parameter changes by an operator's write."""
        parameters = self.recorder.parameter
        parameter = parameters.get(id(tensor), self._whose_data(tensor))
        if parameter is not None:
            self.recorder.written.add(parameter)

    def _keep_written(self, kind: _Kind, args: tuple, kwargs: dict) -> None:
        for position, name in kind.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor) and not self._made_here(tensor):
                    self._note_written(tensor)
                    self.recorder.restore.before_write(tensor)

    def _made_here(self, tensor: Tensor) -> bool:
        try:
            return tensor.untyped_storage()._cdata in self.own
        except NotImplementedError:  # sparse and other layouts without a storage
            return True

    def _count(self, frame: Frame, output: Any) -> None:
        """Count the results of an operator for the innermost module."""
        for tensor in output if isinstance(output, (list, tuple)) else (output,):
            if isinstance(tensor, Tensor):
                if frame.number >= 0:
                    self.recorder.records[frame.number].activation_bytes += (
                        tensor.numel() * tensor.element_size()
                    )
                if tensor.layout is torch.strided:
                    self.own.add(tensor.untyped_storage()._cdata)

    def _run_random(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator that may draw, and mark the running modules if it does."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self.recorder.restore.keep_generator(value)
        before = torch.default_generator.get_state()
        output = func(*args, **kwargs)
        drew = not torch.equal(before, torch.default_generator.get_state())
        if not drew and self._drew_elsewhere(func, args, kwargs, output):
            drew = True
        if drew:
            for frame in self.recorder.frames[1:]:
                self.recorder.records[frame.number].random = True
        return output

    def _drew_elsewhere(self, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
        """Whether another generator was used, as far as the arguments tell."""
        first = output[0] if isinstance(output, (list, tuple)) and output else output
        if not isinstance(first, Tensor):
            return False
        given = {
            a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(func._schema.arguments)
        }
        if isinstance(given.get("generator"), torch.Generator):
            return True
        if first.device.type == "cpu" or given.get("dropout_p") == 0.0:
            return False
        return first.numel() > 0

    def _made_on_meta(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Tensors made by a model on the device of its parameters, or moved there.

        Integers and bools keep their values, on the CPU: a model may look at its masks.
        """
        if any(isinstance(value, Tensor) and value.is_meta for value in args):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": torch.device("cpu")})
        if made.is_floating_point() or made.is_complex():
            return traced_tensors.as_meta(made)
        self.valued.add(made.untyped_storage()._cdata)
        return made

    def _to_meta(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, Tensor | None]:
        """Replace tensors by meta tensors where one is among them; an operator on the
        user's own numbers and on buffers alone is computed.

        Returns the new arguments, and the first argument if it was replaced.
        """
        flat = [*args, *kwargs.values()]
        flat += [v for value in flat if isinstance(value, (list, tuple)) for v in value]
        if not any(isinstance(v, Tensor) and v.is_meta for v in flat):
            return args, kwargs, None
        new = tuple(traced_tensors.as_meta(v) for v in args)
        new_kwargs = {
            k: torch.device("meta")
            if k == "device" and v is not None
            else traced_tensors.as_meta(v)
            for k, v in kwargs.items()
        }
        first = args[0] if args and isinstance(args[0], Tensor) else None
        return new, new_kwargs, None if first is None or first.is_meta else first
