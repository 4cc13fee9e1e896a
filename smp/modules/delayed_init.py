"""``smp.delay_param_initialization``: a model larger than one rank's memory.

Inside the context, tensors are made on the meta device, without memory, and their operators are
recorded.  The *tape* has the operators, each with the storages read and written.  At the
partition every rank runs, in order, the tape's part for its own parameters and buffers.

Values equal undelayed construction, bit for bit.  An operator with random numbers draws them at
once, into a scratch tensor, and so moves the generator on.  The generator's state of before is
kept, and set again for the operator's replay.
"""

import contextlib
import functools
import heapq
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_flatten, tree_map

from smp import _core
from smp.marks import CONVERTS
from smp.modules import creation
from smp.pytorch import patches


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Modules created inside get their values when the model is partitioned.

    Each rank then makes those of its own parameters alone, one tensor at a time.  The values
    are those of a construction without this context.  Tensors outside a ``DistributedModel``
    stay without values.

    Args:
        enabled: False: the context does nothing.

    Raises:
        RuntimeError: an operator cannot be recorded; the text names it and the module.

    Source: SageMaker Python SDK documentation, ``smp.delay_param_initialization``.
    """
    if not enabled or _is_recording():
        yield
        return
    change = patches.delayed_conversions
    try:
        with (
            change.in_block(_converting_later, lasts=_recorder.is_in_use),
            creation.noticed(lambda module: change.while_alive(module, _converting_later)),
            _recorder,
            _OnHost(_recorder),
        ):
            yield
    finally:
        _recorder.scratch.free()


class _Ref(NamedTuple):
    """A tensor by its view of a recorded storage."""

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


class _Scratch:
    """Memory to draw into: one mapping, of the largest tensor's size so far.

    Tensors from the heap would leave holes there, filled by small objects.
    """

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def like(self, ref: _Ref) -> Tensor:
        """A tensor of the reference's shape, strides and dtype; the last one's memory."""
        reach = 1 + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True))
        needed = reach * ref.dtype.itemsize if 0 not in ref.size else 0
        if needed > len(self.bytes):
            self.free()
            self.bytes = torch.frombuffer(mmap.mmap(-1, needed), dtype=torch.uint8)
        return _show(self.bytes.untyped_storage(), ref._replace(offset=0))

    def free(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        _core.trim_heap()


class Recorder(TorchDispatchMode):
    """The tape."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = _Scratch()
        self.tape: list[_Op] = []
        self.writers: list[list[int]] = []  # by storage: its operators in the tape
        self.numbers: dict[int, int] = {}  # by the address of a meta storage
        self.storages: list[StorageWeakRef] = []  # so that their addresses stay their own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # here tensors give their true device
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
        except (NotImplementedError, RuntimeError) as error:  # the operator needs the data
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
        """Whether the tensor shows a recorded storage."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self.numbers

    def is_in_use(self) -> bool:
        """Whether there is a tensor with a recorded storage."""
        return not all(storage.expired() for storage in list(self.storages))

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
            return  # a view: refs show storages, by any way to them
        inputs = tree_map(self._to_ref, (args, kwargs))
        generator = state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = _generator(kwargs, args)
            state = generator.get_state()
        for tensor in made.values():
            self._number(tensor)
        if state is not None:
            into = [self.ref(t) for t in outputs if isinstance(t, Tensor)]
            self._draw(func, inputs, {self.ref(t) for t in written}, into)
        refs = [self.ref(t) if isinstance(t, Tensor) else None for t in outputs]
        writes = {self.numbers[address] for address in made}
        writes |= {self.ref(t).storage for t in written}
        self._append(func, inputs, refs, writes, generator, state)

    def call(
        self, function: Callable[..., Tensor], given: tuple[Tensor, ...], shown: Tensor
    ) -> Tensor:
        """Record a call of a function other than torch's operators.

        Args:
            function: of tensors with their values.
            given: some of them recorded.
            shown: a meta tensor of the result's shape, strides and dtype, used nowhere else.
        """
        self._number(shown)
        ref = self.ref(shown)
        self._append(function, (tree_map(self._to_ref, given), {}), [ref], {ref.storage})
        return shown

    def _number(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        self.numbers[storage._cdata] = len(self.storages)
        self.storages.append(StorageWeakRef(storage))
        self.writers.append([])

    def _append(
        self,
        function: Any,
        inputs: tuple,
        outputs: list[_Ref | None],
        writes: set[int],
        generator: torch.Generator | None = None,
        state: Tensor | None = None,
    ) -> None:
        reads = frozenset(r.storage for r in _refs_in(inputs))
        for storage in writes:
            self.writers[storage].append(len(self.tape))
        self.tape.append(
            _Op(  # type: ignore[call-arg]
                function,
                *inputs,
                outputs,
                reads,
                frozenset(writes),
                generator,
                state,
                torch.get_default_dtype(),
            )
        )

    def _to_ref(self, value: Any) -> Any:
        return self.ref(value) if isinstance(value, Tensor) and self.knows(value) else value

    def _draw(self, func: Any, inputs: tuple, written: set[_Ref], made: list[_Ref]) -> None:
        """Move the generator on: run the operator on scratch memory.

        Args:
            written: changed by the operator.
            made: returned by the operator.
        """
        read = [r.storage for r in _refs_in(inputs) if r not in written]
        values = self.replay(read)

        def real(value: Any) -> Any:
            if not isinstance(value, _Ref):
                return value
            if value in written:
                return scratch(value)
            return _show(values[value.storage], value)

        def scratch(ref: _Ref) -> Tensor:
            if len(written | set(made)) == 1:  # the scratch memory is one tensor's
                return self.scratch.like(ref)
            return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)

        args, kwargs = _map_refs(real, inputs)
        into = None if written else _with_out(func)
        if into is None:
            func(*args, **kwargs)
        else:
            given = {k: v for k, v in kwargs.items() if k not in _OF_THE_RESULT}
            into(*args, **given, out=scratch(made[0]))

    def _run_with_values(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator in need of recorded tensors' data now."""
        inputs = tree_map(self._to_ref, (args, kwargs))
        values = self.replay([r.storage for r in _refs_in(inputs)])
        args, kwargs = _map_refs(
            lambda v: _show(values[v.storage], v) if isinstance(v, _Ref) else v, inputs
        )
        return func(*args, **kwargs)

    def replay(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """The recorded storages with these numbers, with their values so far.

        Only the operators behind them are run; results are kept only while in use.
        """
        keep = set(wanted)
        needed: set[int] = set()
        latest_first: list[int] = []  # writers of needed storages, a heap of -place

        def need(storages: Iterable[int], before: int) -> None:
            for storage in set(storages) - needed:
                needed.add(storage)
                for place in self.writers[storage]:
                    if place < before:
                        heapq.heappush(latest_first, -place)

        need(keep, len(self.tape))
        ops: list[_Op] = []
        last: dict[int, int] = {}  # by storage: its last use, in operators from the end
        while latest_first:
            place = -heapq.heappop(latest_first)
            while latest_first and latest_first[0] == -place:
                heapq.heappop(latest_first)  # the operator writes several
            op = self.tape[place]
            for storage in op.reads | op.writes:
                last.setdefault(storage, len(ops))
            ops.append(op)
            need(op.reads, place)
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
    """Have recorded tensors give host memory as their device.

    Functions of torch.nn.init and models skip work on meta tensors.
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


_OF_THE_RESULT = ("dtype", "layout", "device", "pin_memory", "memory_format")


def _with_out(func: Any) -> Any:
    """The overload of an operator with its one result written into a given tensor, or None."""
    overload = func._schema.overload_name
    name = f"{overload}_out" if overload else "out"
    found = getattr(func._overloadpacket, name, None)
    return found if found is not None and len(found._schema.returns) == 1 else None


def _generator(kwargs: dict, args: tuple) -> torch.Generator:
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    return given[0] if given else torch.default_generator


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments changed by an operator."""
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
    """The class of the innermost module with a running method."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__qualname__
        frame = frame.f_back  # type: ignore[assignment]
    return "the script"


_recorder = Recorder()


def _is_recording() -> bool:
    return _recorder in _get_current_dispatch_mode_stack()


def _converting_later(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``nn.Module._apply`` where ``model.half()`` and alike wait for delayed values, too.

    Behind the context no other code sees them.  Buffers and dtypes on the way are as without
    delay, unseen by a look at the model's parameters at the partition.
    """

    @functools.wraps(plain)
    def _apply(
        self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        return plain(self, fn if _is_recording() else _converting(fn), *args, **kwargs)

    return _apply


# --------------------------------------------------------------------------- the partition


def is_delayed(tensor: Tensor) -> bool:
    """Whether a tensor gets its values when the model is partitioned."""
    with torch._C.DisableTorchFunction():
        return _recorder.knows(tensor)


def applied(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """``function(*given)``; where values are delayed, of the values, once made.

    Args:
        function: called with meta tensors now, and with values at the partition, for one
            parameter after the other, on their ranks.  Returns a tensor of its own.
    """
    if not any(map(is_delayed, given)):
        return function(*given)
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return _recorder.call(function, given, function(*tree_map(_on_meta, given)))


def value_of(tensor: Tensor) -> Tensor:
    """A tensor with its values so far, delayed or not; in memory of its own."""
    if not is_delayed(tensor):
        return tensor.detach().clone()
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        ref = _recorder.ref(tensor)
        return _show(_recorder.replay({ref.storage})[ref.storage], ref)


def _converting(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """For ``module._apply``: the function, of delayed tensors at the partition.

    Args:
        function: from ``model.to(...)``, to another dtype or device.
    """
    if hasattr(function, CONVERTS):
        return function  # of the module around

    def convert(tensor: Tensor) -> Tensor:
        if not is_delayed(tensor):
            return function(tensor)
        empty = torch.empty([0] * tensor.dim(), dtype=tensor.dtype, device="cpu")
        dtype = function(empty).dtype  # a meta tensor has no device yet
        shown = torch.empty_like(tensor.data, dtype=dtype)
        return _recorder.call(function, (tensor.data,), shown)

    setattr(convert, CONVERTS, True)
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
    parameters = [(n, p) for n, p in root.named_parameters() if is_delayed(p)]
    places = [
        (holder, key, tensor)
        for path, module in root.named_modules()
        if owns_module(path)
        for holder in (module._buffers, module.__dict__)
        for key, tensor in holder.items()
        if isinstance(tensor, Tensor) and is_delayed(tensor)
    ]
    made: dict[int, torch.UntypedStorage] = {}  # a storage shown by several is made once

    def value(tensor: Tensor) -> Tensor:
        # One at a time: their sources may not fit together.
        ref = _recorder.ref(tensor)
        if ref.storage not in made:
            made.update(_recorder.replay({ref.storage}))
        return _show(made[ref.storage], ref)

    with _disable_current_modes(), torch.no_grad():
        for name, parameter in parameters:
            owned = owns_parameter(name)
            _put_into(parameter, value(parameter) if owned else _without_memory(parameter))
        replaced: dict[int, Tensor] = {}  # by id
        for holder, key, tensor in places:
            if id(tensor) not in replaced:
                new = replaced[id(tensor)] = value(tensor)
                new.__dict__.update(tensor.__dict__)
                if new.requires_grad != tensor.requires_grad:
                    new.requires_grad_(tensor.requires_grad)
            holder[key] = replaced[id(tensor)]
    for module in root.modules():
        if not _holds_delayed(module):
            patches.delayed_conversions.no_longer_for(module)


def _holds_delayed(module: nn.Module) -> bool:
    """Whether it has a tensor without values: one of a module on another rank."""
    held = (module._parameters, module._buffers, module.__dict__)
    tensors = (one for some in held for one in some.values() if isinstance(one, Tensor))
    return any(map(is_delayed, tensors))


def _without_memory(parameter: Tensor) -> Tensor:
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    data.untyped_storage().resize_(0)
    return data


def _put_into(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a meta parameter other data, device included; it stays the same object."""
    new = Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    # torch.utils.swap_tensors would also swap class and attributes, but these stay here.  It
    # also refuses tensors with weak references, as of nn.LSTM: these stay right, too.
    torch._C._swap_tensor_impl(parameter, new)
