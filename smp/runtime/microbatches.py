"""Cutting a step's arguments into microbatches, and putting its outputs together."""

import copy
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor


class StepOutput:
    """The versions of one returned tensor, by microbatch.

    Args:
        outputs: one tensor per microbatch, in order.
        weights: number of samples in each microbatch; None: all have as many.

    Attributes:
        outputs: list of tensors, one per microbatch, in order.
    """

    def __init__(self, outputs: list[Tensor], weights: list[float] | None = None):
        self.outputs = list(outputs)
        self._weights = weights

    def reduce_mean(self) -> Tensor:
        """The mean over microbatches, each weighted by its share of the samples."""
        if self._weights is None or len(set(self._weights)) <= 1:
            return self.reduce_sum() / len(self.outputs)
        total = sum(self._weights)
        parts = [o * (w / total) for o, w in zip(self.outputs, self._weights, strict=True)]
        return _sum(parts)

    def reduce_sum(self) -> Tensor:
        """The sum over microbatches, in their order."""
        return _sum(self.outputs)

    def concat(self) -> Tensor:
        """The outputs one behind the other along the first dimension; scalars stacked.

        Raises:
            RuntimeError: they differ in another dimension.
        """
        if all(o.dim() == 0 for o in self.outputs):
            return torch.stack(self.outputs)
        return torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """The outputs along a new first dimension, one entry per microbatch.

        Raises:
            RuntimeError: they differ in shape.
        """
        return torch.stack(self.outputs)

    def detach(self) -> "StepOutput":
        """The same without gradients."""
        return StepOutput([o.detach() for o in self.outputs], self._weights)

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.outputs)

    def __getitem__(self, index):
        return self.outputs[index]

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"'StepOutput' object has no attribute {name!r}: it holds a tensor for each "
            "microbatch; reduce_mean(), concat() and stack() make one of them"
        )


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def is_named_tuple(value: Any) -> bool:
    """Whether the value is an instance of a class of ``namedtuple``."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def is_sequence(value: Any) -> bool:
    """Whether the value is a list or tuple, of any subclass, that may hold tensors."""
    return isinstance(value, list | tuple) and not isinstance(value, torch.Size)


def is_set(value: Any) -> bool:
    """Whether the value is a plain set."""
    return type(value) in (set, frozenset)


def collection_like(value: Any, parts: list) -> Any:
    """A sequence or set of the type of ``value``, with these parts, without ``__init__``."""
    kind: Any = type(value)
    plain = kind in (list, tuple) or is_set(value)
    if plain or hasattr(kind, "n_sequence_fields"):  # as of torch.return_types
        return kind(parts)
    if is_named_tuple(value):
        return kind(*parts)
    if isinstance(value, list):
        made = copy.copy(value)
        list.__setitem__(made, slice(None), parts)
        return made
    made = tuple.__new__(kind, parts)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def rebuild_like(value: Any, parts: Mapping) -> Any:
    """A dict subclass or dataclass like ``value`` with these values, without ``__init__``."""
    kind: Any = type(value)
    made = kind.__new__(kind)
    if isinstance(value, defaultdict):
        made.default_factory = value.default_factory
    if isinstance(value, dict):
        for key in value:
            made[key] = parts[key]
    for key, old in vars(value).items() if hasattr(value, "__dict__") else ():
        object.__setattr__(made, key, parts.get(key, old))
    return made


def short_name_of(function: Callable) -> str:
    """For messages; a callable object, as a partial, has no name but its class's."""
    return getattr(function, "__name__", type(function).__name__)


class Samples(NamedTuple):
    """The number of samples of a tensor among the arguments.

    Attributes:
        argument: its name, and where in it.
        shape, axis: of the tensor, and of its cut.
    """

    argument: str
    shape: tuple[int, ...]
    axis: int

    @property
    def total(self) -> int:
        """Number of samples."""
        return self.shape[self.axis]

    def __str__(self) -> str:
        return (
            f"argument '{self.argument}' has {self.total} samples on axis {self.axis} "
            f"(shape {self.shape})"
        )

    def by_microbatch(self, microbatches: int) -> list[int]:
        """As ``torch.tensor_split`` gives them."""
        least, more = divmod(self.total, microbatches)
        return [least + (i < more) for i in range(microbatches)]


class Splitter:
    """Cuts the arguments of one step function.

    Args:
        function: the step function; its argument names matter.
        non_split_inputs: names of arguments given whole to every microbatch.
        input_split_axes: name -> axis to cut along, where it is not 0.

    Source: SageMaker Python SDK documentation, ``smp.step``.
    """

    def __init__(
        self,
        function: Callable,
        non_split_inputs: list[str] | None = None,
        input_split_axes: dict[str, int] | None = None,
    ):
        self.signature = inspect.signature(function)
        self.whole = set(non_split_inputs or ())
        self.axes = dict(input_split_axes or {})
        by_kind: dict[Any, list[str]] = defaultdict(list)
        for parameter in self.signature.parameters.values():
            by_kind[parameter.kind].append(parameter.name)
        kind = inspect.Parameter
        self.positional = by_kind[kind.POSITIONAL_ONLY] + by_kind[kind.POSITIONAL_OR_KEYWORD]
        self.rest = by_kind[kind.VAR_POSITIONAL]
        variadic = bool(by_kind[kind.VAR_KEYWORD])
        for name in [*self.whole, *self.axes]:
            if name not in self.signature.parameters and not variadic:
                raise ValueError(
                    f"smp.step: '{name}' is no argument of "
                    f"{short_name_of(function)}{self.signature}"
                )

    def count(self, most: int, args: tuple, kwargs: dict) -> int:
        """The arguments' number of microbatches: ``most``, or one for each sample.

        Raises:
            ValueError: a tensor has no samples, or fewer than ``most`` and than another has.
        """
        if most == 1 and _are_tensors(args, kwargs):
            return 1
        samples: list[Samples] = []
        self._columns(0, args, kwargs, samples)
        by_count = sorted(samples, key=lambda one: one.total)
        if not by_count or by_count[0].total >= most:
            return most
        fewest, largest = by_count[0], by_count[-1]
        if fewest.total == 0:
            raise ValueError(
                f"smp.step: {fewest}: use a batch that has some, or name it in non_split_inputs"
            )
        if fewest.total < largest.total:
            raise ValueError(
                f"smp.step: {fewest}, which is fewer than the {most} microbatches, and "
                f"'{largest.argument}' has {largest.total}: give both as many, or name "
                f"'{fewest.argument}' in non_split_inputs"
            )
        return fewest.total

    def split(
        self, microbatches: int, args: tuple, kwargs: dict
    ) -> tuple[list[tuple[tuple, dict]], list[float]]:
        """The arguments of each microbatch, and each one's number of samples.

        Args:
            microbatches: their number, as in :meth:`count`, or fewer.
        """
        if microbatches == 1 and _are_tensors(args, kwargs):
            return [(args, kwargs)], [1.0]
        samples: list[Samples] = []
        columns, named = self._columns(microbatches, args, kwargs, samples)
        calls = [
            (tuple(c[i] for c in columns), {k: v[i] for k, v in named.items()})
            for i in range(microbatches)
        ]
        if not samples:
            return calls, [1.0] * microbatches
        return calls, [float(n) for n in samples[0].by_microbatch(microbatches)]

    def _columns(
        self, count: int, args: tuple, kwargs: dict, samples: list[Samples]
    ) -> tuple[list[list], dict[str, list]]:
        """For each argument its pieces."""
        names = self._names(args)
        columns = [self._cut(a, count, n, samples) for a, n in zip(args, names, strict=True)]
        return columns, {k: self._cut(v, count, k, samples) for k, v in kwargs.items()}

    def _names(self, args: tuple) -> list[str]:
        known = self.positional
        if len(args) <= len(known):
            return known[: len(args)]
        beyond = range(len(known), len(args))  # *args takes them
        return known + [self.rest[0] if self.rest else f"argument {i}" for i in beyond]

    def _cut(self, value: Any, count: int, name: str, samples: list[Samples]) -> list:
        if name in self.whole:
            return [value] * count
        return cut(value, count, self.axes.get(name, 0), name, samples)


def _are_tensors(args: tuple, kwargs: dict) -> bool:
    return not kwargs and all(isinstance(a, Tensor) for a in args)


def cut(value: Any, count: int, axis: int, name: str, samples: list[Samples]) -> list:
    """``count`` pieces of a value; tensors at any depth are cut, the rest is shared.

    Args:
        samples: gets those of each cut tensor; with ``count`` 0 nothing else is done.
    """
    if isinstance(value, Tensor):
        return _cut_tensor(value, count, axis, name, samples)
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(count, i, axis) for i in range(count)]
    if isinstance(value, torch.nn.Module):
        return [value] * count

    def inner(part: Any, at: Any) -> list:
        return cut(part, count, axis, f"{name}[{at!r}]", samples)

    if is_sequence(value) or is_set(value):
        columns = [inner(part, i) for i, part in enumerate(value)]
        return [collection_like(value, [c[i] for c in columns]) for i in range(count)]
    if isinstance(value, dict):
        columns_by_key = {key: inner(part, key) for key, part in value.items()}
        return [
            _dict_like(value, {k: c[i] for k, c in columns_by_key.items()})
            for i in range(count)
        ]
    if isinstance(value, Mapping) and hasattr(value, "data") and isinstance(value.data, dict):
        # A UserDict such as transformers' BatchEncoding.
        return cut(dict(value), count, axis, name, samples)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: inner(getattr(value, f.name), f.name) for f in dataclasses.fields(value)
        }
        return [rebuild_like(value, {k: c[i] for k, c in fields.items()}) for i in range(count)]
    return [value] * count


def _dict_like(value: dict, parts: dict) -> dict:
    return parts if type(value) is dict else rebuild_like(value, parts)


def _cut_tensor(
    value: Tensor, count: int, axis: int, name: str, samples: list[Samples]
) -> list:
    if value.dim() == 0:
        return [value] * count
    if axis >= value.dim() or axis < -value.dim():
        raise ValueError(
            f"smp.step: argument '{name}' with shape {tuple(value.shape)} has no axis {axis}; "
            "name it in non_split_inputs or give its axis in input_split_axes"
        )
    samples.append(Samples(name, tuple(value.shape), axis))
    if count < 2:
        return [value] * count
    return list(torch.tensor_split(value, count, dim=axis))


def merge(outputs: list, weights: list[float]) -> Any:
    """One value out of the step function's value for each microbatch.

    Tensors become :class:`StepOutput`, containers keep their type, ``None`` stays, any
    other value becomes the list of its versions.
    """
    first = outputs[0]
    if all(isinstance(o, Tensor) for o in outputs):
        return StepOutput(outputs, weights)
    if any(type(o) is not type(first) for o in outputs):
        return list(outputs)
    if first is None:
        return None
    if is_sequence(first):
        if len({len(o) for o in outputs}) > 1:
            return list(outputs)
        columns = [merge(list(c), weights) for c in zip(*outputs, strict=True)]
        return collection_like(first, columns)
    if isinstance(first, dict):
        if any(list(o) != list(first) for o in outputs):
            return list(outputs)
        return _dict_like(first, {k: merge([o[k] for o in outputs], weights) for k in first})
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return rebuild_like(
            first,
            {
                f.name: merge([getattr(o, f.name) for o in outputs], weights)
                for f in dataclasses.fields(first)
            },
        )
    return list(outputs)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value with every tensor in it, at any depth, replaced by ``function(tensor)``."""
    if isinstance(value, Tensor):
        return function(value)
    if is_sequence(value) or is_set(value):
        return collection_like(value, [map_tensors(v, function) for v in value])
    if isinstance(value, dict):
        return _dict_like(value, {k: map_tensors(v, function) for k, v in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return rebuild_like(
            value,
            {
                f.name: map_tensors(getattr(value, f.name), function)
                for f in dataclasses.fields(value)
            },
        )
    return value


def map_calls(
    calls: list[tuple[tuple, dict]], function: Callable[[Tensor], Tensor]
) -> list[tuple[tuple, dict]]:
    """The calls with ``function(tensor)`` for each tensor, once for shared ones."""
    made: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return [map_tensors(call, once) for call in calls]
