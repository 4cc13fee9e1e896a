"""Partitions to test with: which rank runs which module.

A partition is a dict from a module's first path in ``named_modules()`` to its rank.
What every partition keeps [design.md, section 5]: the root is on rank 0; modules that
share a parameter are together; a module that reads another's parameters is beside it;
a module that holds neither parameters nor buffers is where its parent is.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

import smp
from tests.reference.objects import tensors_in

Partition = dict[str, int]


def random_partition(
    model: nn.Module, ranks: int, seed: int, together: Iterable[tuple[str, str]] = ()
) -> Partition:
    """A random partition, the same wherever it is computed.

    A module stays on its parent's rank or moves to any other with equal odds, so that
    calls are nested over the ranks (0 calls 1, which calls 0) as often as not.

    Args:
        together: pairs of module paths that must be on one rank, beside those that
            share parameters and those that say so (``reads_weights_of``, a class
            attribute with names of children).
    """
    rng = random.Random(f"{seed} on {ranks}")
    return _assign(
        model,
        lambda path, parent: rng.randrange(ranks) if rng.random() < 0.5 else parent,
        together,
    )


def partition_by_path(
    model: nn.Module, ranks: Mapping[str, int], together: Iterable[tuple[str, str]] = ()
) -> Partition:
    """The rank that is given for a path, else the parent's.

    Raises:
        KeyError: a path that the model does not have.
    """
    for path in ranks:
        model.get_submodule(path)
    return _assign(model, lambda path, parent: ranks.get(path, parent), together)


def distributed(
    net: nn.Module, ranks: Mapping[str, int] | Sequence[int], **options: Any
) -> smp.DistributedModel:
    """The model of ``net``, whose modules are pinned to pp_ranks.

    Args:
        ranks: by path, or of the children in order.
    """
    if not isinstance(ranks, Mapping):
        ranks = dict(zip((name for name, _ in net.named_children()), ranks, strict=True))
    for path, rank in ranks.items():
        smp.set_partition(net.get_submodule(path), rank)
    return smp.DistributedModel(net, **options)


def weight_reads(model: nn.Module, run: Callable[[], Any]) -> list[tuple[str, str]]:
    """(reader, holder) of each parameter that one module's code reads from another.

    Args:
        run: runs the model on a batch; only what it runs is seen.
    """
    paths = {module: path for path, module in model.named_modules()}
    holders = {p: path for module, path in paths.items() for p in module._parameters.values()}
    running: list[str] = []
    reads: dict[tuple[str, str], None] = {}

    class Reads(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if not isinstance(getattr(function, "__self__", None), property) and running:
                for tensor in tensors_in(args, kwargs):
                    if isinstance(tensor, nn.Parameter) and tensor in holders:
                        reads[running[-1], holders[tensor]] = None
            return function(*args, **(kwargs or {}))

    def begin(module: nn.Module, args: tuple) -> None:
        running.append(paths[module])

    def end(module: nn.Module, args: tuple, output: Any) -> None:
        running.pop()

    handles = [module.register_forward_pre_hook(begin) for module in paths]
    handles += [module.register_forward_hook(end) for module in paths]
    try:
        with Reads():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [(reader, holder) for reader, holder in reads if reader != holder]


def _assign(
    model: nn.Module, choose: Callable[[str, int], int], together: Iterable[tuple[str, str]]
) -> Partition:
    """``choose(path, parent's rank)`` decides for the first module of each group."""
    paths = {module: path for path, module in model.named_modules()}
    group = {path: path for path in paths.values()}

    def first(path: str) -> str:
        while group[path] != path:
            path = group[path]
        return path

    for a, b in [*together, *_ties(paths)]:
        group[first(b)] = first(a)
    rank_of: Partition = {}
    rank_of_group = {first(""): 0}
    for module, path in paths.items():
        parent = path.rpartition(".")[0]
        inherited = 0 if path == "" else rank_of[parent]
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            if first(path) not in rank_of_group:
                rank_of_group[first(path)] = choose(path, inherited)
            rank_of[path] = rank_of_group[first(path)]
        else:
            rank_of[path] = inherited
    return rank_of


def _ties(paths: Mapping[nn.Module, str]) -> Iterable[tuple[str, str]]:
    holders: dict[nn.Parameter, str] = {}
    for module, path in paths.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                yield holders.setdefault(parameter, path), path
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            yield path.rpartition(".")[0], path  # never called: its parent reads it
        for child in getattr(module, "reads_weights_of", ()):
            yield path, paths[getattr(module, child)]
