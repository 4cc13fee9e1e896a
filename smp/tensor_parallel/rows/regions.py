"""Regions: modules of the user's own class, run on the samples of the whole TP_GROUP.

A region's ``forward`` stays the user's.  On its way in, arguments with samples are gathered
from all tp_ranks.  Inside, linears hold slices of their weights.  The linear that leads out
sums over the tp_ranks and gives each its own samples back.

Sequences may be of different lengths on the tp_ranks.  They are padded to the longest, with the
padding masked, and cut back on the way out.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from smp.marks import PATH, REFUSES_COPIES, REGION, set_class
from smp.modules.stand_ins import stand_in, users_class
from smp.pytorch.accelerator import RandomState
from smp.pytorch.compiled_code import not_traced
from smp.slicing.slices import refuse_copies
from smp.tensor_parallel import group, primitives, script_uses
from smp.tensor_parallel.rows import (
    assumed_sizes,
    caches,
    inside_regions,
    random_streams,
    same_samples,
)
from smp.tensor_parallel.rows.assumed_sizes import Everyones


class Region(NamedTuple):
    """The arguments gathered on the way into a module.

    Attributes:
        samples: names of arguments with a row for each sample, or one row for all.  The first
            is the hidden state, ``[samples, positions, ...]`` or ``[samples, ...]``.
        masks: names of arguments with masks of positions, ``[samples, ..., positions]``, each
            with the name of the masked argument.
        causal: in a call: whether without a mask a position sees the earlier ones only; None:
            unknown.
        sums: whether a tp_rank's output is its part of a sum, and the sum is led out; else
            a linear inside leads out.
    """

    samples: tuple[str, ...]
    masks: tuple[tuple[str, str], ...] = ()
    causal: bool | None = False
    sums: bool = False


class Rows(NamedTuple):
    """The rows of a gathered tensor.

    Attributes:
        counts: samples of each tp_rank; None: all have the same ones.
        positions: of this tp_rank's sequences; None: as gathered.
        within: path of the module around: linears in it lead the rows out, in its call.
        backward: of the gather, by torch's number; -1: in none.
    """

    counts: list[int] | None
    positions: int | None
    within: str = ""
    backward: int = -1

    def lead_out(self, path: str) -> bool:
        """Whether the linear at ``path``, called now, leads these out."""
        is_inside = not self.within or path.startswith(f"{self.within}.")
        return is_inside and self.backward == torch._C._current_graph_task_id()

    def of_call(self, within: str) -> "Rows":
        """The same, gathered now."""
        return self._replace(within=within, backward=torch._C._current_graph_task_id())


class _InThisThread(threading.local):
    rows: Rows | None = None
    common: RandomState | None = None  # of the ranks' streams, while they draw from others


# A task has a thread of its own until it ends, and a region leads out in the order of its
# calls: the rows gathered last in this thread lead out next.
_gathered = _InThisThread()


def rows_to_give_back(path: str) -> Rows:
    """The rows gathered by the region of this call.

    Raises:
        RuntimeError: the linear at ``path`` was called outside of its region.
    """
    rows = _gathered.rows
    if rows is None or not rows.lead_out(path):
        again = ""
        if torch._C._current_graph_task_id() != -1:
            again = (
                " (in a backward: to compute it again, use smp.set_activation_checkpointing, "
                "or checkpoint all of that module)"
            )
        raise RuntimeError(
            f"smp: '{path}' holds a slice of its weights and was called outside of the module "
            f"whose forward it belongs to{again}; call that module, or leave it whole: "
            "smp.set_tensor_parallelism(module, False)"
        )
    return rows


_not_traced = not_traced("a region that smp splits over the TP_GROUP")
_not_traced_itself = not_traced("a region that smp splits over the TP_GROUP", False)


class _Opened:
    """A call with rows gathered and led out; behind it they are forgotten.

    Args:
        led_out_later: by the module around it, in its call.
    """

    @_not_traced
    def __init__(self, led_out_later: bool = False) -> None:
        self._led_out_later = led_out_later
        self._before = _gathered.rows, _gathered.common, group.called_path()

    @_not_traced
    def __enter__(self) -> None:
        _gathered.common = None

    @_not_traced
    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None or not self._led_out_later:
            draw_alike()
            _gathered.rows, _gathered.common, path = self._before
            group.call_of(path)


def found_again(function: Callable) -> Callable:
    """A function to call now, and again in a backward, in the same surroundings.

    These are the rows of the region around the call.
    """
    if group.size() == 1:
        return function
    rows, common, path = _gathered.rows, _gathered.common, group.called_path()
    was_called = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal was_called
        if not was_called:
            was_called = True
            return function(*args, **kwargs)
        with _Opened():
            _gathered.rows = None if rows is None else rows.of_call(rows.within)
            _gathered.common = common
            group.call_of(path)
            return function(*args, **kwargs)

    return call


def draw_alike() -> None:
    """The sum on the way out is done: from here on the tp_ranks' values are the same."""
    if _gathered.common is not None:
        _gathered.common.restore()
        _gathered.common = None


def make_region(
    module: nn.Module, region: Region, path: str, within: str | None = None
) -> None:
    """Have a module gather its arguments from now on.

    Args:
        module: its class is another one then.
        region: its arguments to gather.
        path: of it.
        within: path of the module around it with the way out (`make_holder`); None: the module
            itself.
    """
    module.__dict__[PATH] = path
    signature = inspect.signature(users_class(type(module)).forward)
    kinds = {p.kind: p.name for p in signature.parameters.values()}
    extra = kinds.get(inspect.Parameter.VAR_KEYWORD)
    module.__dict__[REGION] = region, path, within, signature, extra
    set_class(module, stand_in(type(module), _members))


def make_holder(module: nn.Module) -> None:
    """Have the rows of a region in the module be forgotten at the end of its call."""
    set_class(module, stand_in(type(module), _holds_region))


def _holds_region(cls: type[nn.Module]) -> dict[str, Any]:
    @_not_traced_itself
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Opened():
            return cls.__call__(self, *args, **kwargs)

    # Not the forward: transformers checkpoints a layer by that of its very class.
    return {"__call__": call}


def _members(cls: type[nn.Module]) -> dict[str, Any]:
    users_forward = cls.forward

    @_not_traced_itself
    @functools.wraps(users_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Opened(led_out_later=self.__dict__[REGION][2] is not None):
            return _run(self, functools.partial(users_forward, self), args, kwargs)

    return {"forward": forward, REFUSES_COPIES: refuse_copies}


@_not_traced_itself
def _run(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    bound, others, rows = _enter(module, args, kwargs)
    try:
        out = forward(*bound.args[1:], **bound.kwargs)
    except RuntimeError as error:
        path = module.__dict__[REGION][1]
        caches.refuse_after(error, {**others, **bound.arguments}, module, path)
        raise
    return _leave(module, {**others, **bound.arguments}, rows, out)


@_not_traced
def _enter(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[inspect.BoundArguments, dict[str, Any], Rows]:
    """The arguments of a region's call, gathered.

    Returns:
        the arguments; those of them without a name in its signature; and their rows.
    """
    region, path, within, signature, extra = module.__dict__[REGION]
    inside_regions.refuse(module)
    bound = signature.bind(module, *script_uses.whole_among(args), **kwargs)
    named = bound.arguments
    names = [*region.samples, *(mask for mask, _ in region.masks)]
    others = named.get(extra, {}) if extra else {}
    given = {n: named.get(n, others.get(n)) for n in names}
    group.call_of(path)
    if group.same_samples():
        same_samples.check(module, given[region.samples[0]])
        gathered, rows = _enter_alike(given)
        caches.refuse_gradients_of_others({**others, **named}, module, path)
    else:
        arguments = {**others, **named}
        asked = _asks_for_causal(module, arguments)
        called = region._replace(causal=_is_causal(module, asked))
        gathered, rows = _gather(called, path, given, asked)
        caches.refuse_others(arguments, module, path, gathered[region.samples[0]].size(0))
        caches.refuse_padding(arguments, path, uneven=rows.positions is not None)
    _gathered.rows = rows.of_call(path if within is None else within)
    _gathered.common = random_streams.fork()
    for name, value in gathered.items():
        if name in signature.parameters:
            named[name] = value
        elif extra and value is not None:
            named.setdefault(extra, {})[name] = value
    return bound, others, rows


@_not_traced
def _leave(module: nn.Module, arguments: dict[str, Any], rows: Rows, out: Any) -> Any:
    """A region's result, from its own output."""
    region, path, *_ = module.__dict__[REGION]
    if isinstance(out, tuple) and _records_attentions(arguments):
        raise NotImplementedError(
            f"smp: '{path}' is split, and output_attentions would be the weights of some heads "
            "for all tp_ranks' samples: leave the attentions whole, "
            "smp.set_tensor_parallelism(attention, False)"
        )
    if not region.sums:
        return out
    out = give_back(out, rows)
    draw_alike()
    return out


def takes_cache(module: nn.Module) -> bool:
    """Whether the module is a region with the samples of the whole TP_GROUP in its cache."""
    if REGION not in module.__dict__:
        return False
    _, _, _, signature, _ = module.__dict__[REGION]
    return any(name in signature.parameters for name in caches.CACHES)


def give_back(part: Tensor, rows: Rows) -> Tensor:
    """This tp_rank's own samples and positions of the sum of all tp_ranks' parts."""
    if rows.counts is None:
        return primitives.fwd_allreduce_for_tp(part)
    out = primitives.reduce_scatter(part, 0, rows.counts)
    return out if rows.positions is None else out.narrow(1, 0, rows.positions)


def _records_attentions(arguments: dict[str, Any]) -> bool:
    """Whether transformers keeps the weights returned by an attention.

    Some models tell the attention; in others a hook of transformers takes the weights, and the
    attention's arguments need not tell.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    keys = collector.get() or () if collector is not None else ()
    return bool(arguments.get("output_attentions")) or any(
        key.endswith("attentions") for key in keys
    )


# --------------------------------------------------------- ranks with the same samples


def _enter_alike(given: dict[str, Any]) -> tuple[dict, Rows]:
    """Backward sums the gradients of the entering tensors over the tp_ranks."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        leaves, spec = tree_flatten(value)
        entered = [
            primitives.bwd_allreduce_for_tp(leaf)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
            else leaf
            for leaf in leaves
        ]
        out[name] = tree_unflatten(entered, spec) if leaves else value
    return out, Rows(None, None)


# ------------------------------------------------------------------------------ gathering

_DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool,
    torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16,
]  # fmt: skip
_AXES = 6
_WORDS = 3 + _AXES  # of a tensor in the header: axes, dtype, whether it requires grad, sizes


def _in_words(tensor: Tensor | None, path: str) -> list[int]:
    if tensor is None:
        return [-1] * _WORDS
    if tensor.dim() > _AXES or tensor.dtype not in _DTYPES:
        raise NotImplementedError(
            f"smp: '{path}' got a tensor of shape {list(tensor.shape)} and {tensor.dtype}, "
            "which tensor parallelism does not gather"
        )
    sizes = [*tensor.shape, *[0] * (_AXES - tensor.dim())]
    requires_grad = tensor.requires_grad and torch.is_grad_enabled()
    return [tensor.dim(), _DTYPES.index(tensor.dtype), requires_grad, *sizes]


class _Argument(NamedTuple):
    """A tensor among the arguments, as each tp_rank has it."""

    path: str  # of the region
    name: str
    mine: Tensor | None
    shapes: list[list[int] | None]  # by tp_rank; None: it has none
    dtypes: list[torch.dtype | None]

    def sizes(self, axis: int) -> list[int]:
        """Lengths along an axis, by tp_rank; of those with the tensor."""
        return [shape[axis] for shape in self.shapes if shape is not None]

    def is_uneven(self) -> bool:
        """Whether the tp_ranks have different numbers of positions, axis 1."""
        shape = next((s for s in self.shapes if s is not None), None)
        return shape is not None and len(shape) > 1 and len(set(self.sizes(1))) > 1

    def check_alike(self, but: tuple[int, ...]) -> None:
        """Make sure that the tp_ranks' tensors can be joined.

        Args:
            but: axes with possible differences.

        Raises:
            ValueError: on every tp_rank alike; the text names both shapes.
        """
        having = [rank for rank, shape in enumerate(self.shapes) if shape is not None]

        def compared(rank: int) -> Any:
            shape = self.shapes[rank] or []
            sizes = [n for axis, n in enumerate(shape) if axis not in but]
            return len(shape), sizes, self.dtypes[rank]

        for rank in having[1:]:
            if compared(rank) != compared(having[0]):
                a, b = (
                    f"{self.shapes[r]} {str(self.dtypes[r]).removeprefix('torch.')}"
                    for r in (having[0], rank)
                )
                raise ValueError(
                    f"smp: '{self.path}' got {self.name} of shape {a} on tp_rank {having[0]} "
                    f"and {b} on tp_rank {rank}: the ranks of a TP_GROUP work on it together"
                )


def _asks_for_causal(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether a call asks its attention function for causality, as transformers' ones read it.

    The argument comes from the model's call or from its config.
    """
    asked = arguments.get("is_causal")
    return bool(getattr(module, "is_causal", False) if asked is None else asked)


def _is_causal(module: nn.Module, asked: bool) -> bool | None:
    """Whether a position sees the earlier ones only in a call without a mask.

    Only transformers' attention functions with kernels for causality do this.
    """
    function = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not asked or function in (None, "eager"):
        return False
    return True if function == "sdpa" or "flash" in function else None


def _check_causal_alike(path: str, everyones: Everyones) -> None:
    """Make sure that the tp_ranks' calls ask for causality alike; the last word says it.

    Raises:
        ValueError: on every tp_rank alike.
    """
    asked = [bool(words[-1]) for words in everyones]
    if len(set(asked)) > 1:
        other = asked.index(not asked[0])
        raise ValueError(
            f"smp: '{path}' got is_causal={asked[0]} on tp_rank 0 and {asked[other]} on "
            f"tp_rank {other}: the ranks of a TP_GROUP work on it together"
        )


def _gather(
    region: Region, path: str, given: dict[str, Any], asks_for_causal: bool
) -> tuple[dict[str, Any], Rows]:
    """The arguments with all tp_ranks' samples.  Collective over the TP_GROUP."""
    _refuse_masks_of_no_tensor(region, path, given)
    flat = {name: tree_flatten(value) for name, value in given.items()}
    tensors = {
        name: [leaf if isinstance(leaf, Tensor) else None for leaf in leaves or [None]]
        for name, (leaves, _) in flat.items()
    }
    hidden = tensors[region.samples[0]][0]
    if hidden is None:
        raise TypeError(f"smp: '{path}' got no tensor as {region.samples[0]}")
    words = [w for leaves in tensors.values() for t in leaves for w in _in_words(t, path)]
    mine = (*words, int(asks_for_causal))

    def gathered(everyones: Everyones, signature: int) -> tuple[dict[str, Any], Rows]:
        _check_causal_alike(path, everyones)
        arguments = _arguments(path, tensors, everyones)
        return _gather_all(region, given, flat, arguments, signature)

    if assumed_sizes.is_possible(hidden):
        sizes = assumed_sizes.everyones(region, mine)
        with contextlib.suppress(assumed_sizes.Unlike):
            return gathered(sizes, assumed_sizes.signature(sizes))
    sizes = tuple(tuple(words) for words in group.gather_numbers([*mine]))
    out = gathered(sizes, 0)
    assumed_sizes.remember(region, mine, sizes)
    return out


def _refuse_masks_of_no_tensor(region: Region, path: str, given: dict[str, Any]) -> None:
    """Raises NotImplementedError for a mask that cannot be gathered."""
    for name, _ in region.masks:
        mask = given[name]
        if mask is not None and not isinstance(mask, Tensor):
            raise NotImplementedError(
                f"smp: '{path}' got {name} as a {type(mask).__name__}, which masks this rank's "
                "samples and not those of the whole TP_GROUP: have it be a tensor "
                "(attn_implementation 'sdpa' or 'eager'), or leave the attention whole, "
                "smp.set_tensor_parallelism(attention, False)"
            )


def _gather_all(
    region: Region,
    given: dict[str, Any],
    flat: dict[str, Any],
    arguments: dict[str, list[_Argument]],
    signature: int,
) -> tuple[dict[str, Any], Rows]:
    """The same, with the tp_ranks' sizes known or assumed.

    Args:
        flat: the given values, by ``tree_flatten``; ``arguments`` in the same order.
        signature: of an assumption, sent with the first gather; 0: the sizes are known.
    """
    first = arguments[region.samples[0]][0]
    hidden = first.mine
    assert hidden is not None
    counts = first.sizes(0)
    own_positions = hidden.size(1) if first.is_uneven() else None
    masked = dict(region.masks)
    out: dict[str, Any] = {}
    for name, (leaves, spec) in flat.items():
        new: list[Any] = []
        for argument, leaf in zip(arguments[name], leaves or [None], strict=True):
            if leaf is not None and not isinstance(leaf, Tensor):
                new.append(leaf)
            elif name in masked:
                keys = arguments[masked[name]][0]
                causal = region.causal if keys is first else False
                new.append(_gather_mask(argument, first, keys, causal, hidden, counts))
            else:
                new.append(_gather_samples(argument, counts, signature))
                signature = 0
        out[name] = tree_unflatten(new, spec) if leaves else given[name]
    return out, Rows(counts, own_positions)


def _arguments(
    path: str, tensors: dict[str, list[Tensor | None]], everyones: Everyones
) -> dict[str, list[_Argument]]:
    """The tp_ranks' tensors, by argument."""
    out: dict[str, list[_Argument]] = {}
    at = 0
    for name, leaves in tensors.items():
        out[name] = []
        for leaf in leaves:
            shapes: list[list[int] | None] = []
            dtypes: list[torch.dtype | None] = []
            required = False
            for words in everyones:
                axes, dtype, requires_grad, *sizes = words[at : at + _WORDS]
                required |= requires_grad > 0
                shapes.append(sizes[:axes] if axes >= 0 else None)
                dtypes.append(_DTYPES[dtype] if axes >= 0 else None)
            if leaf is not None:
                leaf = primitives.requiring(leaf, required)
            out[name].append(_Argument(path, name, leaf, shapes, dtypes))
            at += _WORDS
    return out


def _gather_samples(argument: _Argument, counts: list[int], signature: int) -> Tensor | None:
    """All tp_ranks' rows; positions padded with zeros."""
    absent = [shape is None for shape in argument.shapes]
    if all(absent):
        return None
    if any(absent):
        has, has_not = absent.index(False), absent.index(True)
        raise ValueError(
            f"smp: '{argument.path}' got {argument.name} on tp_rank {has} and not on tp_rank "
            f"{has_not}: the ranks of a TP_GROUP work on it together"
        )
    x = argument.mine
    assert x is not None
    uneven = argument.is_uneven()
    argument.check_alike(but=(0, 1) if uneven else (0,))
    x = _a_row_for_each(argument, x, counts[group.rank()])
    if uneven:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, max(argument.sizes(1)) - x.size(1)])
    return primitives.gather(x, 0, counts, signature)


def _a_row_for_each(argument: _Argument, x: Tensor, samples: int) -> Tensor:
    if x.size(0) == samples:
        return x
    if x.size(0) != 1:
        raise ValueError(
            f"smp: '{argument.path}' got {argument.name} of shape {list(x.shape)} for "
            f"{samples} samples"
        )
    return x.expand(samples, *x.shape[1:])


def _gather_mask(
    argument: _Argument,
    queries: _Argument,
    keys: _Argument,
    causal: bool | None,
    hidden: Tensor,
    counts: list[int],
) -> Tensor | None:
    """All tp_ranks' masks; for a tp_rank without one, a mask without further effect.

    Args:
        queries, keys: the arguments with the seeing positions, and with the seen ones.
        causal: whether without a mask positions see the earlier ones only; None: unknown.

    Raises:
        ValueError: this matters and is unknown; on every tp_rank alike.
    """
    rank = group.rank()
    having = [tp_rank for tp_rank, shape in enumerate(argument.shapes) if shape is not None]
    longest = max(keys.sizes(1), default=0)
    if causal is None and (
        len(having) not in (0, len(counts)) or not having and keys.is_uneven()
    ):
        without = next(i for i, shape in enumerate(argument.shapes) if shape is None)
        raise ValueError(
            f"smp: '{argument.path}' got no {argument.name} on tp_rank {without}, the ranks of "
            f"its TP_GROUP have sequences of lengths {keys.sizes(1)}, and which positions its "
            "attention function sees without a mask is not known: give a mask on all of them, "
            "or pad the sequences to one length"
        )
    causal = bool(causal)
    if not having:
        if causal or not keys.is_uneven():
            return None
        own = hidden.new_zeros(counts[rank], 1, 1, keys.sizes(1)[rank])
        return primitives.gather(_hide_behind(own, longest), 0, counts)
    model, dtype = argument.shapes[having[0]], argument.dtypes[having[0]]
    assert model is not None and dtype is not None
    mask = argument.mine
    if mask is None:
        seen_here = keys.sizes(1)[rank] if keys.is_uneven() else model[-1]
        mask = _nothing_masked(len(model), dtype, hidden.size(1), seen_here, causal, hidden)
    mask = _a_row_for_each(argument, mask, counts[rank])
    if keys.is_uneven():
        mask = _hide_behind(mask, max(longest, *argument.sizes(-1)))
    else:
        argument.check_alike(but=(0, 1, 2) if len(model) == 4 else (0,))
    if len(model) == 4:
        # A tp_rank without a mask has a row for each query, or one for all.
        of_none = queries.sizes(1) if causal else [1] * len(counts)
        has = zip(argument.shapes, of_none, strict=True)
        rows = max(none if shape is None else shape[2] for shape, none in has)
        if rows > 1 and queries.is_uneven():
            rows = max(queries.sizes(1))
        if rows > mask.size(2) > 1:
            # A padded position sees as the last one does: a position without sight gives nan.
            last = mask[:, :, -1:].expand(-1, -1, rows - mask.size(2), -1)
            mask = torch.cat([mask, last], 2)
        mask = mask.expand(-1, max([mask.size(1), *argument.sizes(1)]), rows, -1)
    return primitives.gather(mask, 0, counts)


def _nothing_masked(
    axes: int, dtype: torch.dtype, queries: int, keys: int, causal: bool, like: Tensor
) -> Tensor:
    """Another tp_rank's mask here, for one sample: causal, or all seen."""
    if axes == 2:  # 1 where a position is seen
        return torch.ones(1, keys, dtype=dtype, device=like.device)
    rows = queries if causal else 1
    seen = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=like.device)
    if rows > 1:
        seen = seen.tril(keys - queries)
    if not dtype.is_floating_point:
        return seen.to(dtype)
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _hide_behind(mask: Tensor, keys: int) -> Tensor:
    """Add hidden positions: hidden even from a position that sees none of its own."""
    hidden = -torch.inf if mask.is_floating_point() else 0
    return F.pad(mask, [0, keys - mask.size(-1)], value=hidden)
