"""The cut loop: what the system must equal, bit for bit.

One process, one thread, a plain loop over the microbatches.  A *request* is the
execution of one microbatch's step function (request 0, on rank 0), or one remote call
(the next number, in order of begin).  The code of a module runs on the module's rank;
a call of a module by code on another rank is remote; an ``nn.Sequential`` makes one
remote call per run of consecutive children on the same other rank.  Then

1. a remote call's tensors pass in and out by one node each (``crossing.py``), and its
   backward is a run of the autograd engine of its own, inside its caller's, so that
   the gradients of what it was given are summed by themselves;
2. each request sees each parameter of its rank as a leaf of its own; what the leaf has
   got when the request's backward ends is added to the sum of that ``model.backward``.
   Backwards end in decreasing order of the requests' begin (a checkpoint's second
   forward, which begins requests in the middle of backward, excepted);
3. the sums of a microbatch's ``model.backward`` calls (mostly one) are added up in
   order, then the microbatches' sums are added to ``.grad`` in order;
4. microbatch i's backward starts with its share of the samples (1 without averaging);
5. random numbers follow ``streams.py``;
6. pre-hooks of a remote module run as its owner, forward and full backward hooks as
   its caller (a forward hook sees the arguments as pre-hooks replaced them); lists,
   dicts and sets in context variables are the caller's objects, as arguments are:
   transformers' hooks inside a remote layer write what they collect (attentions,
   router logits) into one.

With one rank it is the plain loop: nothing is cut, gradients go straight to ``.grad``
and the user's generator is used.
"""

import contextvars
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from tests.reference.crossing import Crossing
from tests.reference.objects import map_tensors, tensors_in
from tests.reference.split import Microbatch, seed_of, split_batch
from tests.reference.streams import Streams, UserGenerator


@dataclass(eq=False)
class Request:
    microbatch: int
    number: int  # 0 is the step function's own execution
    rank: int
    module: str  # path of the module that was called; a run of children: "path.2:path.4"
    random: int  # the int64 drawn for it
    leaves: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict, repr=False)


@dataclass
class Result:
    outputs: list[Any]  # what the step function returned, by microbatch, detached
    requests: list[Request]  # in order of begin

    def tensors(self) -> list[Tensor]:
        """Each tensor of the outputs by microbatch, then the next tensor: the order of
        the tensors in what a step function with ``smp.step`` returns."""
        by_microbatch = [list(tensors_in(output)) for output in self.outputs]
        return [tensor for tensors in zip(*by_microbatch, strict=True) for tensor in tensors]


class StepModel:
    """What a step function gets as its model."""

    def __init__(self, loop: "_Loop", module: nn.Module) -> None:
        self.module = module
        self._loop = loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if grad_tensors is None:
            grad_tensors = [None] * len(outputs)
        given = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors)
        self._loop.backward(outputs, given)


def cut_loop(
    step: Callable,
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rank_of: Mapping[str, int],
    ranks: int | None = None,
    microbatches: int = 1,
    average: bool = True,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    anywhere: Collection[str] = (),
) -> Result:
    """Runs ``step(model, *args, **kwargs)`` as the cut loop; adds to ``.grad``.

    Args:
        rank_of: the rank of each module, by its first path in ``named_modules()``
            (the root's path is ``""``, its rank 0).
        anywhere: paths of modules that run where they are called; among the children of an
            ``nn.Sequential`` they still belong to a run of their rank.
        ranks: pipeline ranks, 1 more than the largest of ``rank_of`` if not given.
        average: ``average_grads_across_microbatches``.

    Raises:
        ValueError: a module without a rank, a root that is not on rank 0, a parameter
            that modules of two ranks hold.
        RuntimeError: code used a parameter of another rank, or ran a backward that
            ``model.backward`` did not begin.
    """
    ranks = ranks or 1 + max(rank_of.values(), default=0)
    streams = UserGenerator() if ranks == 1 else Streams()
    loop = _Loop(model, rank_of, streams, ranks > 1, anywhere)
    batch = split_batch(
        step, model, args, kwargs or {}, microbatches, non_split_inputs, input_split_axes
    )
    return loop.run(step, batch, average)


def plain_loop(
    step: Callable,
    model: nn.Module,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rank_of: Mapping[str, int] | None = None,
    ranks: int | None = None,
    microbatches: int = 1,
    average: bool = True,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
) -> Result:
    """The uncut loop, as a user would write it; arguments as for ``cut_loop``.

    With ``rank_of``, random numbers are those of the cut loop (the same dropout), and
    nothing else is different from the plain loop.
    """
    rank_of = rank_of or {path: 0 for path, _ in model.named_modules()}
    ranks = ranks or 1 + max(rank_of.values(), default=0)
    loop = _Loop(model, rank_of, UserGenerator() if ranks == 1 else Streams(), False)
    batch = split_batch(
        step, model, args, kwargs or {}, microbatches, non_split_inputs, input_split_axes
    )
    return loop.run(step, batch, average)


class _Loop:
    """One step.  Modules are intercepted while it runs and as before afterwards."""

    def __init__(
        self,
        model: nn.Module,
        rank_of: Mapping[str, int],
        streams: Streams,
        cut: bool,
        anywhere: Collection[str] = (),
    ) -> None:
        self._model = model
        self._streams = streams
        self._cut = cut
        self._paths = {module: path for path, module in model.named_modules()}
        missing = [path for path in self._paths.values() if path not in rank_of]
        if missing:
            raise ValueError(f"rank_of has no rank for module {missing[0]!r}")
        if rank_of[""] != 0:
            raise ValueError(f"the root must be on rank 0, not {rank_of['']}")
        self._ranks = {module: rank_of[path] for module, path in self._paths.items()}
        self._anywhere = {m for m, path in self._paths.items() if path in anywhere}
        self._find_parameters()
        self._requests: list[Request] = []
        self._current: Request | None = None
        self._weight: float | None = None
        self._in_backward = False
        self._call_sums: dict[nn.Parameter, Tensor] = {}  # of this model.backward
        self._sums: dict[nn.Parameter, Tensor] = {}  # of this microbatch

    def _find_parameters(self) -> None:
        """Where each parameter is held, and which rank owns it.

        A place is (container, key): an entry of ``_parameters``, or of a plain list in
        which a module has some of its parameters again.
        """
        self._owner: dict[nn.Parameter, int] = {}
        self._name: dict[nn.Parameter, str] = {}
        self._places: dict[int, list[tuple[Any, Any, nn.Parameter]]] = {}
        for module, rank in self._ranks.items():
            places = self._places.setdefault(rank, [])
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                path = f"{self._paths[module]}.{name}".lstrip(".")
                if self._owner.setdefault(parameter, rank) != rank:
                    raise ValueError(
                        f"{path} on rank {rank} is {self._name[parameter]} on rank "
                        f"{self._owner[parameter]}: modules that share a parameter "
                        "must be on one rank"
                    )
                self._name.setdefault(parameter, path)
                places.append((module._parameters, name, parameter))
        for module in self._ranks:
            for value in vars(module).values():
                for index, item in enumerate(value if type(value) is list else ()):
                    if isinstance(item, nn.Parameter) and item in self._owner:
                        self._places[self._owner[item]].append((value, index, item))

    # The loop.

    def run(self, step: Callable, batch: list[Microbatch], average: bool) -> Result:
        outputs = []
        before = {parameter: parameter.grad for parameter in self._owner}
        held = dict(before)
        if self._cut:
            for parameter in held:
                parameter.grad = None
        try:
            with _one_thread(), self._intercepted(), self._streams.step():
                for index, part in enumerate(batch):
                    self._weight = part.weight if average else 1.0
                    outputs.append(self._run_microbatch(step, index, part))
                    for parameter, total in self._sums.items():
                        held[parameter] = _accumulate(held[parameter], total, parameter)
                    self._sums = {}
        except BaseException:
            held = before  # what was None is None again
            raise
        finally:
            if self._cut:
                for parameter, gradient in held.items():
                    parameter.grad = gradient
        return Result(outputs, self._requests)

    def _run_microbatch(self, step: Callable, index: int, part: Microbatch) -> Any:
        self._begun = itertools.count()
        root = self._begin(index, 0, "", 0)
        with self._streams.microbatch(index), self._on(root):
            model = StepModel(self, self._model)
            output = step(model, *part.args, **part.kwargs)
        return map_tensors(Tensor.detach, output)

    def backward(self, outputs: list[Tensor], given: list[Tensor | None]) -> None:
        """``model.backward``: request 0's, and in it those of its remote calls."""
        both = zip(outputs, given, strict=True)
        seeds = [seed_of(output, gradient, self._weight) for output, gradient in both]
        self._in_backward = True
        try:
            torch.autograd.backward(outputs, seeds)
        finally:
            self._in_backward = False
        self._end_backward(self._current)
        for parameter, total in self._call_sums.items():
            _add_to(self._sums, parameter, total)
        self._call_sums = {}
        self._check_nobody_bypassed_the_cut()

    def _check_nobody_bypassed_the_cut(self) -> None:
        for parameter, name in self._name.items() if self._cut else ():
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{name} of rank {self._owner[parameter]} was used by code that "
                    "runs on another rank"
                )

    # Requests.

    def _begin(self, microbatch: int, rank: int, module: str, random: int) -> Request:
        request = Request(microbatch, next(self._begun), rank, module, random)
        if self._cut and not torch.is_inference_mode_enabled():
            places = self._places.get(rank, ())
            request.leaves = {p: _own_leaf(p) for _, _, p in places}
        self._requests.append(request)
        return request

    @contextmanager
    def _on(self, request: Request) -> Iterator[None]:
        """Code in the block runs as ``request``: on its rank, with its leaves."""
        outer, self._current = self._current, request
        put = []
        for container, key, parameter in self._places.get(request.rank, ()):
            if parameter in request.leaves:
                put.append((container, key, container[key]))
                container[key] = request.leaves[parameter]
        try:
            yield
        finally:
            for container, key, before in put:
                container[key] = before
            self._current = outer

    def _end_backward(self, request: Request) -> None:
        """Adds what the request's leaves have got."""
        for parameter, leaf in request.leaves.items():
            if leaf.grad is not None:
                _add_to(self._call_sums, parameter, leaf.grad)
                leaf.grad = None

    def _remote(self, rank: int, module: str, body: Callable, args: tuple, kwargs: dict) -> Any:
        """One remote call: ``body`` runs as a new request on ``rank``."""
        caller = self._current
        random = self._streams.call()
        request = self._begin(caller.microbatch, rank, module, random)
        if not self._cut:
            with self._on(request), self._streams.forward(random):
                return body(*args, **kwargs)

        def run_backward(outputs: list[Tensor], gradients: list[Tensor]) -> None:
            if not self._in_backward:
                raise RuntimeError(
                    f"a backward through the remote call of {module} on rank {rank} "
                    "must begin with model.backward"
                )
            with self._on(request), self._streams.backward(random):
                torch.autograd.backward(outputs, gradients)
            self._end_backward(request)

        crossing = Crossing(run_backward)
        context = _context_containers()
        collected = {id(t) for t in tensors_in(context)} - {
            id(t) for t in tensors_in(args, kwargs)
        }

        def reference(sender: Request, receiver: Request, tensor: Tensor) -> Tensor | None:
            """What is collected already stays where it is."""
            if id(tensor) in collected:
                return tensor
            return self._reference(sender, receiver, tensor)

        there = functools.partial(reference, caller, request)
        args, kwargs, context = crossing.arrive((args, kwargs, context), there)
        with self._on(request), self._streams.forward(random), _context_set(context):
            result = body(*args, **kwargs)
        return crossing.leave(result, functools.partial(reference, request, caller))

    def _reference(self, sender: Request, receiver: Request, tensor: Tensor) -> Tensor | None:
        """What a parameter that the sender does not own is to the receiver."""
        if tensor not in self._owner or self._owner[tensor] == sender.rank:
            return None
        return receiver.leaves.get(tensor, tensor)

    # Interception.

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        original = {module: type(module) for module in self._ranks}
        classes = {cls: self._class(cls) for cls in set(original.values())}
        try:
            for module, cls in original.items():
                module.__class__ = classes[cls]
            with self._checkpoints_bound():
                yield
        finally:
            for module, cls in original.items():
                module.__class__ = cls

    @contextmanager
    def _checkpoints_bound(self) -> Iterator[None]:
        """What a checkpoint computes again runs as the request that called it."""
        place = torch.utils.checkpoint
        name = "_checkpoint_without_reentrant_generator"
        if hasattr(place, f"{name}_impl"):  # from PyTorch 2.14
            name = f"{name}_impl"
        reentrant, other = place.CheckpointFunction, getattr(place, name)
        place.CheckpointFunction = SimpleNamespace(
            apply=lambda function, *rest: reentrant.apply(self._bound(function), *rest)
        )
        again = lambda function, *rest, **options: other(  # noqa: E731
            self._bound(function), *rest, **options
        )
        setattr(place, name, again)
        try:
            yield
        finally:
            place.CheckpointFunction = reentrant
            setattr(place, name, other)

    def _bound(self, function: Callable) -> Callable:
        """``function``, run as the request that is current now.

        In backward that may be another: a checkpoint without re-entrance computes
        again when one of its tensors is needed, be it one of a request that it began.
        """
        request = self._current

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._on(request):
                return function(*args, **kwargs)

        return run

    def _class(self, cls: type) -> type:
        """A subclass of ``cls`` whose calls may be remote."""
        loop = self
        is_sequential = cls.forward is nn.Sequential.forward

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if loop._is_here(module):
                return cls.__call__(module, *args, **kwargs)
            return loop._call_with_hooks(cls, module, args, kwargs)

        @functools.wraps(cls.forward)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not loop._is_here(module):
                body = functools.partial(cls.forward, module)
                return loop._remote(
                    loop._ranks[module], loop._paths[module], body, args, kwargs
                )
            if is_sequential:
                return loop._run_children(module, *args, **kwargs)
            return cls.forward(module, *args, **kwargs)

        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        return type(cls.__name__, (cls,), {**names, "__call__": call, "forward": forward})

    def _is_here(self, module: nn.Module) -> bool:
        return self._ranks[module] == self._current.rank or module in self._anywhere

    def _call_with_hooks(self, cls: type, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """A remote ``module(*args, **kwargs)``, hooks where they belong."""

        def body(*args: Any, **kwargs: Any) -> Any:
            seen = []
            last = module.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
            )
            with _without(module, "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
                result = cls.__call__(module, *args, **kwargs)
            last.remove()
            given = seen[0][0] is args and seen[0][1] == kwargs
            return result, None if given or not module._forward_hooks else seen[0]

        before, after = module._get_backward_pre_hooks(), module._get_backward_hooks()[0]
        backward_hook = BackwardHook(module, after, before) if before or after else None
        if backward_hook is not None:
            args = backward_hook.setup_input_hook(args)
        result, replaced = self._remote(
            self._ranks[module], self._paths[module], body, args, kwargs
        )
        args, kwargs = replaced or (args, kwargs)
        for number, hook in list(module._forward_hooks.items()):
            if number in module._forward_hooks_with_kwargs:
                replaced = hook(module, args, kwargs, result)
            else:
                replaced = hook(module, args, result)
            result = result if replaced is None else replaced
        if backward_hook is not None:
            result = backward_hook.setup_output_hook(result)
        return result

    def _run_children(self, sequential: nn.Sequential, input: Any) -> Any:
        """``nn.Sequential.forward``: one call per run of children on another rank, unless
        one of them has hooks that run as the caller."""
        for rank, group in itertools.groupby(sequential, key=self._ranks.__getitem__):
            children = list(group)
            hooked = any(
                c._forward_hooks or c._backward_hooks or c._backward_pre_hooks for c in children
            )
            here = all(map(self._is_here, children))
            if here or len(children) == 1 or hooked:
                for child in children:
                    input = child(input)
                continue

            def body(input: Any, children: list[nn.Module] = children) -> Any:
                for child in children:
                    input = child(input)
                return input

            name = f"{self._paths[children[0]]}:{self._paths[children[-1]]}"
            input = self._remote(rank, name, body, (input,), {})
        return input


def without_state(model: nn.Module) -> set[str]:
    """The paths of modules without parameters, buffers, children and hooks."""
    return {
        path
        for path, module in model.named_modules()
        if not any(True for _ in module.children())
        and not any(True for _ in module.parameters())
        and not any(True for _ in module.buffers())
        and not (module._forward_pre_hooks or module._forward_hooks)
        and not (module._backward_pre_hooks or module._backward_hooks)
    }


def _own_leaf(parameter: nn.Parameter) -> nn.Parameter:
    """The same memory as ``parameter``, a ``.grad`` of its own."""
    leaf = Tensor._make_subclass(type(parameter), parameter.detach(), parameter.requires_grad)
    vars(leaf).update(vars(parameter))
    return leaf


def _context_containers() -> dict[contextvars.ContextVar, Any]:
    context = contextvars.copy_context()
    return {var: value for var, value in context.items() if type(value) in (list, dict, set)}


@contextmanager
def _context_set(values: Mapping[contextvars.ContextVar, Any]) -> Iterator[None]:
    tokens = [(variable, variable.set(value)) for variable, value in values.items()]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


def _add_to(sums: dict[nn.Parameter, Tensor], parameter: nn.Parameter, term: Tensor) -> None:
    sums[parameter] = sums[parameter] + term if parameter in sums else term


def _accumulate(gradient: Tensor | None, total: Tensor, parameter: Tensor) -> Tensor:
    """``gradient + total`` as ``.grad`` does it: in place where there is one."""
    if gradient is None:
        if total.layout is torch.strided:
            return torch.empty_like(parameter).detach().copy_(total)
        return total.clone()
    if gradient.layout is torch.strided and total.layout is torch.strided:
        return gradient.add_(total)
    return gradient + total


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one order: more threads may divide a sum among them, and an accelerator's
    thread runs its part of a backward when it gets to it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _without(module: nn.Module, *names: str) -> Iterator[None]:
    before = {name: vars(module)[name] for name in names}
    vars(module).update({name: type(value)() for name, value in before.items()})
    try:
        yield
    finally:
        vars(module).update(before)
