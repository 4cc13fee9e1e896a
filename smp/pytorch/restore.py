"""Undoing the marks of a forward pass.

Tracing runs the user's model once before training begins, without a lasting mark.  Random
number generators, buffers, gradients, parameters' requires_grad and attributes of the modules
are put back.  So are the containers and NumPy arrays in modules and arguments, and every tensor
written by an operator.
"""

import collections
import operator
import pickle
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from smp.pytorch import accelerator, generators

DEEPEST = 8  # levels of nested containers to look at

# Ways to look at things, by type.
LEAF, OBJECT, TUPLE, DICT, LIST = range(1, 6)
_kind_of_type: dict[type, int] = {}

# Never looked into: they cannot change, or are put back by other means.
_OPAQUE = (
    type(None),
    Tensor,
    nn.Module,
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.Generator,
    torch.dtype,
    torch.device,
)


class Restore:
    """A context; on leaving it, also by an exception, the state is as on entering.

    Args:
        roots: modules, watched with their whole trees.

    Call :meth:`watch` for further objects, :meth:`before_write` before an operator writes into
    earlier tensors, and :meth:`before_set_data` before a set of one's ``data``.
    """

    def __init__(self, roots: Iterable[nn.Module]):
        self._modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self._containers: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}  # keeps the objects, and so their ids
        # In order: a tensor, and a copy of its content; True: the very data.
        self._written: list[tuple[Tensor, Tensor, bool]] = []
        self._writes: set[tuple] = set()
        self._generators: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> "Restore":
        self._random = _random_states()
        self._grads: list[tuple[nn.Parameter, Tensor | None, bool]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor | None]] = []
        self._lazy_norms: list[Any] = []
        for module in self._modules:
            self.watch_module(module)
        return self

    def watch_module(self, module: nn.Module) -> None:
        """Remember what a module has, without those in it."""
        self._grads += [
            (p, p.grad, p.requires_grad) for p in module._parameters.values() if p is not None
        ]
        self._buffers += [
            (module, name, b, None if b.is_meta or is_lazy(b) else b.detach().clone())
            for name, b in module._buffers.items()
            if b is not None
        ]
        if not isinstance(module, LazyModuleMixin):  # materializing it must last
            self.watch(module.__dict__)
        elif isinstance(module, _NormBase) and module.has_uninitialized_params():
            self._lazy_norms.append(module)

    def __exit__(self, *exception: object) -> None:
        for container, content in reversed(self._containers):
            _put_back(container, content)
        for array, content in self._arrays:
            array[...] = content
        with torch.no_grad():
            for tensor, content, is_data in reversed(self._written):
                if is_data:
                    tensor.data = content
                else:
                    write_back(tensor, content)
            for _, _, buffer, before in self._buffers:
                if before is not None and not _same(buffer, before):
                    write_back(buffer, before)
        for norm in self._lazy_norms:
            if not any(b is not None and is_lazy(b) for b in norm._buffers.values()):
                norm.reset_running_stats()  # as they were made
        for parameter, gradient, required in self._grads:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if parameter.requires_grad is not required:
                parameter.requires_grad_(required)
        for generator, state in self._generators.values():
            generators.put_back(generator, state)
        _set_random_states(self._random)
        # A kept Restore keeps none of the model's objects: nn.LSTM's weak references to its
        # parameters are in a list, and with them those cannot be moved to a device.
        self._containers.clear()
        self._arrays.clear()
        self._seen.clear()

    def changed_buffers(self, module: nn.Module) -> list[str]:
        """Names of the module's own buffers, different from those on entering."""
        return [
            name
            for owner, name, buffer, before in self._buffers
            if owner is module
            and (
                owner._buffers.get(name) is not buffer
                or (before is not None and not _same(buffer, before))
            )
        ]

    def draws(self) -> tuple[str, ...]:
        """The modules of Python's and NumPy's generators, if used since the entering."""
        names = {"python": "random", "numpy": "numpy.random"}
        now = _random_states()
        before = self._random
        return tuple(
            name
            for key, name in names.items()
            if key in before and pickle.dumps(now[key]) != pickle.dumps(before[key])
        )

    def watch(self, thing: Any, depth: int = 0) -> None:
        """Remember the content of containers and plain objects, however nested."""
        kind = kind_of(thing)
        if kind == LEAF or depth > DEEPEST:
            return
        if kind == OBJECT:
            state = getattr(thing, "__dict__", None)
            if isinstance(state, dict):
                self.watch(state, depth)
            if _can_be_kept(thing) and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._arrays.append((thing, thing.copy()))
            elif generators.is_generator(thing):
                self.keep_generator(thing)
            return
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if kind == TUPLE:
            content: Any = thing
        else:
            content = dict(thing) if kind == DICT else list(thing)
            self._containers.append((thing, content))
        for value in content.values() if kind == DICT else content:
            if _kind_of_type.get(type(value)) != LEAF:
                self.watch(value, depth + 1)

    def before_write(self, tensor: Tensor) -> None:
        """Keep a copy of a tensor before the first write into it."""
        if tensor.is_meta:
            return
        key: tuple = (id(tensor),)  # _written keeps the tensor, and so its id
        if tensor.layout is torch.strided:
            key = (
                tensor.untyped_storage()._cdata,
                tensor.storage_offset(),
                tuple(tensor.shape),
                tensor.stride(),
            )
        if key not in self._writes:
            self._writes.add(key)
            self._written.append((tensor, tensor.detach().clone(), False))

    def before_set_data(self, tensor: Tensor) -> None:
        """Keep a tensor's data before another's take their place."""
        self._written.append((tensor, tensor.data, True))

    def expect(self, earlier: "Restore") -> None:
        """Keep at once the tensors and generators written or used by an earlier, equal run."""
        for tensor, _, is_data in earlier._written:
            if not is_data:
                self.before_write(tensor)
        for generator, _ in earlier._generators.values():
            self.keep_generator(generator)

    def keep_generator(self, generator: Any) -> None:
        """Remember the state of a generator of the model's own."""
        if id(generator) not in self._generators:
            self._generators[id(generator)] = (generator, generators.state_of(generator))


def kind_of(thing: Any) -> int:
    """The way to look at it: one of ``LEAF``, ``OBJECT``, ``TUPLE``, ``DICT`` and ``LIST``."""
    return _kind_of_type.get(type(thing)) or _learn_kind(type(thing))


def _learn_kind(type_: type) -> int:
    kinds = (
        (_OPAQUE, LEAF),
        (dict, DICT),
        ((list, collections.deque, set), LIST),
        (tuple, TUPLE),
    )
    kind = next((kind for bases, kind in kinds if issubclass(type_, bases)), OBJECT)
    _kind_of_type[type_] = kind
    return kind


def is_array(thing: Any) -> bool:
    """Whether the thing is NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray)


def _can_be_kept(thing: Any) -> bool:
    """Whether the thing is a changeable array in memory: a mapped file may be larger."""
    if not is_array(thing) or not thing.flags.writeable:
        return False
    while is_array(thing) and not isinstance(thing, sys.modules["numpy"].memmap):
        thing = thing.base
    return not is_array(thing)


def write_back(tensor: Tensor, content: Tensor) -> None:
    """Give a tensor its former shape and content, outside of autograd."""
    if tensor.shape != content.shape:
        tensor.resize_(content.shape)
    write(tensor.data, content)  # .data: the version counter stays out of it


def write(tensor: Tensor, content: Tensor) -> None:
    """Copy the content, of the tensor's shape, also where elements share memory."""
    if tensor.layout is torch.strided and 0 in tensor.stride():  # expanded
        own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor, content = tensor[own], content[own]
    if tensor.layout is not torch.strided or not _overlaps(tensor):
        tensor.copy_(content)
        return
    places = torch.arange(1 + _reach(tensor), device=tensor.device)
    row = tensor.as_strided(places.shape, (1,))
    row[places.as_strided(tensor.shape, tensor.stride())] = content


def _reach(tensor: Tensor) -> int:
    """From the first element to the last, in elements."""
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor without expanded axes may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.layout is not b.layout:
        return False
    pairs = zip(parts_of(a), parts_of(b), strict=True)
    # NaNs are the same where their bits are.
    return all(torch.equal(x, y) or torch.equal(_bits(x), _bits(y)) for x, y in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors inside a tensor of any layout."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def _holds_still(container: Any, content: Any) -> bool:
    """Whether a container has its very objects of before."""
    if len(container) != len(content):
        return False
    if not isinstance(container, dict):
        return all(map(operator.is_, container, content))
    base = _base_of(container)
    return all(map(operator.is_, base.__iter__(container), content)) and all(
        map(operator.is_, base.values(container), content.values())
    )


def _base_of(container: dict) -> Any:
    """A class with a plain dict's methods: ModelOutput and others forbid their own."""
    if isinstance(container, collections.OrderedDict):
        return collections.OrderedDict
    return dict


def _put_back(container: Any, content: Any) -> None:
    """Give a container its former content, unless it has it still."""
    if _holds_still(container, content):
        return
    if isinstance(container, dict):
        base = _base_of(container)
        base.clear(container)
        for key, value in content.items():
            base.__setitem__(container, key, value)
        return
    if isinstance(container, list):
        list.__setitem__(container, slice(None), content)
    else:
        container.clear()
        add = container.add if isinstance(container, set) else container.append
        for value in content:
            add(value)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": accelerator.RandomState(every_device=True),
    }
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    states["torch"].restore()
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])
