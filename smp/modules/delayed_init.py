"""``smp.delay_param_initialization``: a model larger than one rank's memory.

Inside the context, tensors are made on the meta device, without memory, and what is done
to them is recorded: a *tape* of operators, each with the storages that it reads and
writes.  At the partition every rank runs, in order, the part of the tape that its own
parameters and buffers depend on.

Values equal undelayed construction, bit for bit: an operator that draws random numbers
draws them at once, into a scratch tensor that is dropped, so that the generator moves on
as it would have; its state before is kept and set again when the operator is replayed.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

_recorders: list["Recorder"] = []


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Modules created inside get their values when the model is partitioned.

    Each rank then makes those of its own parameters alone, one tensor at a time, with
    the values that they would have had without this context.  What is not under a
    ``DistributedModel`` stays without values.

    Args:
        enabled: False: the context does nothing.

    Raises:
        RuntimeError: an operator cannot be recorded; names it and the module.

    Source: SageMaker Python SDK documentation, ``smp.delay_param_initialization``.
    """
    if not enabled:
        yield
        return
    recorder = Recorder()
    _recorders.append(recorder)
    with recorder, _OnHost(recorder):
        yield


class _Ref(NamedTuple):
    """A tensor by what it shows of a recorded storage."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Op(NamedTuple):
    """One operator of the tape."""

    function: Any
    args: tuple  # with _Refs
    kwargs: dict[str, Any]
    outputs: list[_Ref | None]
    reads: frozenset[int]
    writes: frozenset[int]  # and makes
    generator: torch.Generator | None
    generator_state: Tensor | None
    default_dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """The tape of one context."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[_Op] = []
        self.numbers: dict[int, int] = {}  # by the address of a meta storage
        self.storages: list[torch.UntypedStorage] = []  # kept, so that addresses stay theirs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # here tensors say where they are
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if tensors:
            concerns_us = any(self.knows(t) for t in tensors)
        else:
            concerns_us = self._makes_a_tensor(func, kwargs)
        if not concerns_us:
            return func(*args, **kwargs)
        written = [t for t in _written(func, args, kwargs) if isinstance(t, Tensor)]
        to_host = func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None
        if to_host or any(not self.knows(t) for t in written):
            return self._run_with_values(func, args, kwargs)
        meta_kwargs = tree_map(_on_meta, kwargs)
        if "device" in kwargs or not tensors:
            meta_kwargs["device"] = torch.device("meta")
        try:
            out = func(*tree_map(_on_meta, args), **meta_kwargs)
        except (NotImplementedError, RuntimeError) as error:  # it needs the data
            if written:
                raise RuntimeError(
                    f"smp.delay_param_initialization: {func} in {_module_in_construction()} "
                    f"cannot be recorded ({error}); construct that module outside of the "
                    "context, or with enabled=False"
                ) from error
            return self._run_with_values(func, args, kwargs)
        self._record(func, args, kwargs, out, written)
        return out

    def knows(self, tensor: Tensor) -> bool:
        """Whether it shows a recorded storage."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self.numbers

    def ref(self, tensor: Tensor) -> _Ref:
        return _Ref(
            self.numbers[tensor.untyped_storage()._cdata],
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )

    @staticmethod
    def _makes_a_tensor(func: Any, kwargs: dict) -> bool:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return False
        return any(argument.name == "device" for argument in func._schema.arguments)

    def _record(
        self, func: Any, args: tuple, kwargs: dict, out: Any, written: list[Tensor]
    ) -> None:
        outputs = out if isinstance(out, list | tuple) else (out,)
        made = {
            t.untyped_storage()._cdata: t
            for t in outputs
            if isinstance(t, Tensor) and not self.knows(t)
        }
        if func._overloadpacket is torch.ops.aten.set_ or not (made or written):
            return  # a view: refs show storages, however they were reached
        inputs = tree_map(self._to_ref, (args, kwargs))
        generator = state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = _generator(kwargs, args)
            state = generator.get_state()
            self._draw(func, inputs, {self.ref(t) for t in written})
        for address, tensor in made.items():
            self.numbers[address] = len(self.storages)
            self.storages.append(tensor.untyped_storage())
        refs = [self.ref(t) if isinstance(t, Tensor) else None for t in outputs]
        writes = {self.numbers[address] for address in made}
        writes |= {self.ref(t).storage for t in written}
        reads = {r.storage for r in _refs_in(inputs)}
        self.tape.append(
            _Op(  # type: ignore[call-arg]
                func,
                *inputs,
                refs,
                frozenset(reads),
                frozenset(writes),
                generator,
                state,
                torch.get_default_dtype(),
            )
        )

    def _to_ref(self, value: Any) -> Any:
        return self.ref(value) if isinstance(value, Tensor) and self.knows(value) else value

    def _draw(self, func: Any, inputs: tuple, written: set[_Ref]) -> None:
        """Move the generator on: run the operator on scratch memory."""
        read = [r.storage for r in _refs_in(inputs) if r not in written]
        values = self.replay(read)

        def real(value: Any) -> Any:
            if not isinstance(value, _Ref):
                return value
            if value in written:
                return torch.empty_strided(value.size, value.stride, dtype=value.dtype)
            return _show(values[value.storage], value)

        args, kwargs = _map_refs(real, inputs)
        func(*args, **kwargs)

    def _run_with_values(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator that needs the data of recorded tensors now."""
        inputs = tree_map(self._to_ref, (args, kwargs))
        values = self.replay([r.storage for r in _refs_in(inputs)])
        args, kwargs = _map_refs(
            lambda v: _show(values[v.storage], v) if isinstance(v, _Ref) else v, inputs
        )
        return func(*args, **kwargs)

    def replay(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """The recorded storages with these numbers, with their values so far.

        Only what they depend on is run, and kept only as long as it is used.
        """
        keep = set(wanted)
        needed = set(keep)
        ops: list[_Op] = []
        last: dict[int, int] = {}  # by storage: how many operators from the end use it last
        for op in reversed(self.tape):
            if op.writes & needed:
                needed |= op.reads
                for storage in op.reads | op.writes:
                    last.setdefault(storage, len(ops))
                ops.append(op)
        values: dict[int, torch.UntypedStorage] = {}
        for from_end in reversed(range(len(ops))):
            op = ops[from_end]
            self._run(op, values)
            for storage in op.reads | op.writes:
                if storage not in keep and last[storage] == from_end:
                    values.pop(storage, None)
        return values

    def _run(self, op: _Op, values: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = _map_refs(
            lambda v: _show(values[v.storage], v) if isinstance(v, _Ref) else v,
            (op.args, op.kwargs),
        )
        with _as_then(op), torch.no_grad():
            out = op.function(*args, **kwargs)
        outputs = out if isinstance(out, list | tuple) else (out,)
        for tensor, ref in zip(outputs, op.outputs, strict=True):
            if ref is None or ref.storage in values:
                continue
            if (tensor.stride(), tensor.storage_offset()) != (ref.stride, ref.offset):
                laid_out = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
                tensor = laid_out.copy_(tensor)
            values[ref.storage] = tensor.untyped_storage()


class _OnHost(TorchFunctionMode):
    """Recorded tensors say that they are in host memory.

    Functions of torch.nn.init and models leave out what is to be done to meta tensors.
    """

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _PLACES:
            with torch._C.DisableTorchFunction():
                if self.recorder.knows(args[0]):
                    return _PLACES[func]
        return func(*args, **(kwargs or {}))


_PLACES = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: torch.device("cpu"),  # type: ignore[attr-defined]
}


@contextlib.contextmanager
def _as_then(op: _Op) -> Iterator[None]:
    """The default dtype and the generator as when the operator was recorded."""
    dtype = torch.get_default_dtype()
    state = op.generator.get_state() if op.generator is not None else None
    torch.set_default_dtype(op.default_dtype)
    if op.generator is not None and op.generator_state is not None:
        op.generator.set_state(op.generator_state)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if op.generator is not None and state is not None:
            op.generator.set_state(state)


def _generator(kwargs: dict, args: tuple) -> torch.Generator:
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    return given[0] if given else torch.default_generator


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments that an operator changes."""
    out = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            out.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return out


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_meta:
        return value.to("meta")
    return value


def _refs_in(value: Any) -> list[_Ref]:
    return [v for v in tree_flatten(value, is_leaf=_is_ref)[0] if _is_ref(v)]


def _map_refs(function: Callable, value: Any) -> Any:
    return tree_map(function, value, is_leaf=_is_ref)


def _is_ref(value: Any) -> bool:
    return isinstance(value, _Ref)


def _show(storage: torch.UntypedStorage, ref: _Ref) -> Tensor:
    empty = torch.empty(0, dtype=ref.dtype, device=storage.device)
    return empty.set_(storage, ref.offset, ref.size, ref.stride)


def _module_in_construction() -> str:
    """The class of the innermost module whose method is running."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__qualname__
        frame = frame.f_back  # type: ignore[assignment]
    return "the script"


# --------------------------------------------------------------------------- the partition

# Of a parameter that is to be made of a recorded tensor: that tensor, and how.
_MADE_OF = "_smp_made_of"


def is_delayed(parameter: Tensor) -> bool:
    """Whether a parameter gets its values when the model is partitioned."""
    return _recorder_of(parameter) is not None


def make_of_recorded(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> None:
    """Have a delayed parameter be a function of what was recorded for it.

    Args:
        parameter: stays the same object, and has the function's shape from now on.
        function: called with a meta tensor now, and with the recorded values at the partition,
            for one parameter after the other, on the ranks that own it.
    """
    whole = parameter.data
    parameter.data = function(whole)
    setattr(parameter, _MADE_OF, (whole, function))


def converting(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """For ``module._apply``: the function, of delayed tensors at the partition.

    Args:
        function: as ``model.to(...)`` has it, to another dtype or device.
    """

    def convert(tensor: Tensor) -> Tensor:
        made_of = getattr(tensor, _MADE_OF, None)
        if made_of is None and not is_delayed(tensor):
            return function(tensor)
        whole, before = made_of or (tensor.data, None)
        empty = torch.empty([0] * tensor.dim(), dtype=tensor.dtype, device="cpu")
        converted = tensor.data.to(function(empty).dtype)  # a meta tensor has no device yet

        def both(values: Tensor) -> Tensor:
            return function(values if before is None else before(values))

        if isinstance(tensor, nn.Parameter):
            tensor.data = converted
            converted = tensor
        setattr(converted, _MADE_OF, (whole, both))
        return converted

    return convert


def materialize(
    root: nn.Module,
    owns_parameter: Callable[[str], bool],
    owns_module: Callable[[str], bool],
) -> None:
    """Give this rank's parameters, buffers and tensors of modules their values.

    Parameters stay the same objects; those of other ranks get a storage without memory.

    Args:
        owns_parameter: by the first name of a parameter.
        owns_module: by the path of a module.
    """
    if not _recorders:
        return
    parameters = [(n, p) for n, p in root.named_parameters() if _recorder_of(p) is not None]
    derived = [(n, p) for n, p in root.named_parameters() if hasattr(p, _MADE_OF)]
    places = [
        (holder, key, tensor)
        for path, module in root.named_modules()
        if owns_module(path)
        for holder in (module._buffers, module.__dict__)
        for key, tensor in holder.items()
        if isinstance(tensor, Tensor)
        and (_recorder_of(tensor) is not None or hasattr(tensor, _MADE_OF))
    ]
    mine: list[Tensor] = [p for name, p in parameters if owns_parameter(name)]
    mine += [_recorded(tensor) for _, _, tensor in places]
    with _disable_current_modes(), torch.no_grad():
        values = _values_of(mine)
        for name, parameter in parameters:
            owned = owns_parameter(name)
            _put_into(parameter, values[id(parameter)] if owned else _without_memory(parameter))
        for name, parameter in derived:
            whole, function = parameter.__dict__.pop(_MADE_OF)
            if owns_parameter(name):
                # One at a time: the whole ones together may not fit.
                _put_into(parameter, function(_values_of([whole])[id(whole)]))
            else:
                _put_into(parameter, _without_memory(parameter))
        for holder, key, tensor in places:
            value = values[id(_recorded(tensor))]
            if (made_of := getattr(tensor, _MADE_OF, None)) is not None:
                value = made_of[1](value)
            if value.requires_grad != tensor.requires_grad:
                value.requires_grad_(tensor.requires_grad)
            holder[key] = value


def _recorded(tensor: Tensor) -> Tensor:
    """What of a delayed tensor the tape has: of one that was converted, what it was."""
    made_of = getattr(tensor, _MADE_OF, None)
    return tensor if made_of is None else made_of[0]


def _without_memory(parameter: Tensor) -> Tensor:
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    data.untyped_storage().resize_(0)
    return data


def _recorder_of(tensor: Tensor) -> Recorder | None:
    return next((r for r in reversed(_recorders) if r.knows(tensor)), None)


def _values_of(tensors: list[Tensor]) -> dict[int, Tensor]:
    """By id, tensors that show the recorded values; what shared memory still does."""
    out: dict[int, Tensor] = {}
    for recorder in _recorders:
        known = [t for t in tensors if recorder.knows(t)]
        storages = recorder.replay({recorder.ref(t).storage for t in known})
        for tensor in known:
            ref = recorder.ref(tensor)
            out.setdefault(id(tensor), _show(storages[ref.storage], ref))
    return out


def _put_into(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a meta parameter other data, device included; it stays the same object."""
    new = Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    # torch.utils.swap_tensors would also swap class and attributes, which stay here, and
    # refuses tensors with weak references, which nn.LSTM keeps: those stay right, too.
    torch._C._swap_tensor_impl(parameter, new)
