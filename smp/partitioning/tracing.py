"""One forward run of a model, recorded for the partition.

For each module: the place and number of its executions, their time, the bytes of activations
produced, and the parameters used by operators meanwhile.  The run leaves no mark
(``smp/pytorch/restore.py``), and can be made on meta tensors, without memory or
arithmetic.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from smp.collectives.operation import watching
from smp.modules import hook_containers
from smp.partitioning import first_forward, traced_tensors
from smp.partitioning.operators import Operators
from smp.pytorch import compiled_code, patches
from smp.pytorch.contents import can_change, content_of, is_the_same
from smp.pytorch.restore import Restore, parts_of
from smp.slicing.split_parameters import is_plain

_PATIENCE_S = 2.0  # a longer run shows its progress
_NOTE_EVERY_S = 0.5
# By name: the value of an attribute, and its content for comparison.
_Attributes = dict[str, tuple[Any, Any]]
_Held = dict[str, Tensor | None]  # a module's parameters and buffers
# Hears the caller of a collective ("module 'a' (Norm)"), and its ranks.
CheckCollective = Callable[[str, list[int]], None]
_NEVER: tuple[Any, Any] = (object(), object())

_SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
_OF_TORCH = frozenset(vars(nn.Module()))  # its dicts of parameters, hooks, ...
_NOT_SEEN = _OF_TORCH - {"training"} | {"__dict__", "__class__"}


@dataclasses.dataclass(slots=True)
class ModuleTrace:
    """One module in the traced run.

    Attributes:
        first: position of its first execution among all executions; -1: it never ran.
        executions: how often it ran.
        seconds: time of its forward over all executions, without that of the modules called;
            0.0 unless times were asked for.
        total_seconds: the same with the modules called.
        flops: operations of matrix products, convolutions and attention in its forward over all
            executions, without the modules called.
        activation_bytes: bytes of all new tensors of operators while the module was the
            innermost running one, over all executions.  Views and the results of in-place
            operators are not new.
        kept_bytes: bytes of memory kept by autograd for backward while the module was the
            innermost running one, without parameters and buffers.  Each piece of memory counts
            for the first module in need of it.  Tensors made again by a checkpoint are not
            kept.  0 unless memory was asked for.
        input_bytes, output_bytes: bytes of the tensors among its arguments, and in its result,
            for the execution with most.
        parameters: names of the parameters used by operators while it was the innermost running
            module, or passed by it to modules it called.  A read of ``weight.shape`` is no use,
            nor is a use of a passed parameter.
        random: the module, or a module called by it, drew random numbers.
        changed_buffers: names of its own buffers changed by the run.
        buffers: names of buffers, of any module, changed by the run and used by operators as
            for ``parameters``, or set by the module.
        set_attributes: names of its plain attributes set while it ran, and of those changed in
            place, also by other modules.
        own_attributes: names of its plain attributes set, by any code, before any read.
        restored_attributes: those back at their former value at the end of the run.
        carried_attributes: those read first, and set to another value; with the number of their
            reads and sets.
        grows: a value changed in place in an attribute that was not set before.
        outside_reads: names of buffers, of carried attributes and of growing ones, read or set
            while it did not run.
        swapping: paths of modules called by it with other tensors in the places of parameters
            or buffers, as ``torch.func.functional_call`` puts them there; and of those between.
        hooks_keep: hooks of its forward put tensors into a container of the script.
        changed_parameters: names of parameters, of any module, changed by the run and used by
            operators as for ``parameters``.
        reruns: paths of modules given by it to an autograd function of the user's, whose
            backward may call them again; where one of them sets attributes.
        hooking: paths of modules called by it, with hooks (``x.register_hook``) on a tensor of
            their arguments or results.  Only together with it they see the tensor's whole
            gradient, and all hooks run in the order of their registration.  And of those called
            inside a transform of ``torch.func``, whose tensors cannot leave the rank.
    """

    first: int = -1
    executions: int = 0
    seconds: float = 0.0
    total_seconds: float = 0.0
    flops: int = 0
    activation_bytes: int = 0
    kept_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    parameters: tuple[str, ...] = ()
    random: bool = False
    changed_buffers: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    set_attributes: tuple[str, ...] = ()
    own_attributes: tuple[str, ...] = ()
    restored_attributes: tuple[str, ...] = ()
    carried_attributes: dict[str, int] = dataclasses.field(default_factory=dict)
    grows: bool = False
    outside_reads: tuple[str, ...] = ()
    swapping: tuple[str, ...] = ()
    hooks_keep: bool = False
    changed_parameters: tuple[str, ...] = ()
    reruns: tuple[str, ...] = ()
    hooking: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True)
class GradFlag:
    """A parameter's changes of ``requires_grad`` in the traced run.

    Attributes:
        setters: paths of the innermost running modules; None: the code outside all of them.
        read_first: code read it before anything changed it.
        lasts: the flag was another one at the end of the run.
    """

    setters: tuple[str | None, ...]
    read_first: bool
    lasts: bool


@dataclasses.dataclass(slots=True)
class Trace:
    """A traced run of one root module.

    Attributes:
        modules: by path, as in ``root.named_modules()``.
        parameters_outside: names of parameters used by operators while no module ran.
        grad_flags: by name, of the parameters with ``requires_grad`` changed by the run.
        timed: times were measured.
        meta: the run was made on meta tensors.
        weighed: autograd's memory was measured: it was asked for, and the run kept some, unlike
            one under ``torch.no_grad()``.
        made: modules and parameters that the run has put into the models, for
            `first_forward.make`; empty: none.
        makes: the first of them, in words.
        draws: the modules ("random", "numpy.random") with random numbers of their own drawn by
            the run, for all roots.
    """

    modules: dict[str, ModuleTrace]
    parameters_outside: tuple[str, ...]
    grad_flags: dict[str, GradFlag]
    timed: bool
    meta: bool
    weighed: bool = False
    made: bytes = b""
    makes: str = ""
    draws: tuple[str, ...] = ()

    def changed(self) -> dict[str, str]:
        """The run's other changes, by name: attributes and tensors of modules."""
        found: dict[str, str] = {}
        for path, seen in self.modules.items():
            own = (*seen.own_attributes, *seen.carried_attributes, *seen.changed_buffers)
            found |= {f"{path}.{name}".lstrip("."): "attribute" for name in own}
            found |= dict.fromkeys(seen.changed_parameters, "parameter")
        return found


def trace(
    root: nn.Module,
    run: Callable[[], Any],
    times: bool = False,
    meta: bool = False,
    memory: bool = False,
) -> Trace:
    """Trace ``root`` while ``run`` runs.

    Args:
        root: the model.
        run: calls the model once, on one microbatch.
        times: measure the modules' times too; makes a second run for that, without any other
            records.
        meta: replace parameters by meta tensors, for a run without computing.  A model that
            does not allow this is run, with a warning, on its own tensors, or on zeros in place
            of meta tensors.
        memory: measure autograd's memory, too.

    Returns:
        A :class:`Trace`.  The model, random number generators and the containers passed
        to it are as before.

    Raises:
        RuntimeError: the model's parameters are meta tensors, and it can run neither on them
            nor on zeros.
        Exception: any raised by ``run``.

    Source: paper, C.1.
    """
    return trace_models([root], run, times=times, meta=meta, memory=memory)[0]


def trace_models(
    roots: Sequence[nn.Module],
    run: Callable[[], Any],
    times: bool = False,
    meta: bool = False,
    memory: bool = False,
    check: CheckCollective | None = None,
) -> list[Trace]:
    """Trace several models in one run; see :func:`trace`.

    Args:
        check: hears the caller of a collective, and its ranks, before each of them.

    Returns:
        One trace for each.

    Raises:
        CollectiveRefused: raised by ``check``.
    """
    if meta:
        recorder = Recorder(roots, meta=True, memory=memory, check=check)
        try:
            recorder.record(run)
            return recorder.traces(timed=False)
        except CollectiveRefused:
            raise
        except Exception as error:
            why = (
                f"{recorder.running_path()} cannot run on meta tensors "
                f"({type(error).__name__}: {error})"
            )
        if any(p.is_meta for root in roots for p in root.parameters()):
            warnings.warn(f"smp: {why}; tracing on zeros instead", stacklevel=3)
            return _trace_on_zeros(roots, run, memory, why, check)
        warnings.warn(f"smp: {why}; tracing on the model's own tensors instead", stacklevel=3)
    recorder = Recorder(roots, meta=False, memory=memory, check=check)
    recorder.record(run)
    if times:
        recorder.measure(run)
    return recorder.traces(timed=times)


def _trace_on_zeros(
    roots: Sequence[nn.Module],
    run: Callable[[], Any],
    memory: bool,
    why: str,
    check: CheckCollective | None,
) -> list[Trace]:
    with traced_tensors.on_zeros(roots):
        recorder = Recorder(roots, meta=False, memory=memory, check=check)
        try:
            recorder.record(run)
        except CollectiveRefused:
            raise
        except Exception as error:
            raise RuntimeError(
                f"smp: {why}, and {recorder.running_path()} cannot run on zeros "
                f"({type(error).__name__}: {error}); give the model its values before its "
                "first step, or set skip_tracing"
            ) from error
        return recorder.traces(timed=False)


class _Uses:
    """The reads and sets of a module's attribute or buffer, by any code."""

    __slots__ = ("count", "outside", "read_first", "sets")

    def __init__(self, read_first: bool):
        self.read_first = read_first
        self.count = 0
        self.sets = False
        self.outside = False  # also while the module did not run


class CollectiveRefused(RuntimeError):
    """A module calls a collective, and its other ranks do not come."""


class _BackwardInModule(RuntimeError):
    """A module's forward needs tensors saved by autograd."""


class Frame:
    """One running module, or the code outside all of them."""

    __slots__ = ("attributes", "calls_s", "hooked", "module", "number", "started", "used")

    def __init__(self, number: int, module: nn.Module | None):
        self.number = number  # in Recorder.records; -1: outside
        self.module = module
        self.attributes = {} if module is None else _attributes_of(module)
        self.used: set[int] = set()  # ids of parameters
        self.hooked: dict[int, Tensor] = {}  # while it ran, by id
        self.calls_s = 0.0  # time of the modules called
        self.started = 0.0


class Recorder:
    """Hooks and counters for the modules of all roots."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        meta: bool,
        memory: bool,
        check: CheckCollective | None = None,
    ):
        self.roots = roots
        self.meta = meta
        self.memory = memory
        self.check = check
        self.number_of: dict[int, int] = {}  # id of a module -> its number
        self.paths: list[str] = []
        self.modules: list[nn.Module] = []
        for root in roots:
            for path, module in root.named_modules():
                if id(module) not in self.number_of:
                    self.number_of[id(module)] = len(self.modules)
                    self.modules.append(module)
                    self.paths.append(path or f"the root module {type(module).__name__}")
        self.own = {id(p): id(p) for root in roots for p in root.parameters()}
        self.own |= {id(b): id(b) for root in roots for b in root.buffers()}
        # By id, of itself or of its meta twin of this run: the id of the parameter.
        self.parameter = self.own
        # By number of the module, and name.
        self.buffer_of = {
            (number, name): id(buffer)
            for number, module in enumerate(self.modules)
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self.memory_of: dict[int, int] = {}  # by address of a storage: the parameter's id
        self.twins: list[nn.Parameter] = []
        self.keeps_saved = False  # autograd's saved tensors, in the run
        self.thread = threading.get_ident()
        self.timing = False
        self.restore: Restore
        self.registers: first_forward.Registers
        self._begin()

    def _begin(self) -> None:
        self.records = [ModuleTrace() for _ in self.modules]
        self.draws: tuple[str, ...] = ()
        self.left: list[_Attributes] = []  # by module, as its last execution left them
        self.uses: dict[tuple[int, str], _Uses] = {}  # by number of the module, and name
        self.written: set[int] = set()  # ids of parameters written by operators
        self.flags_read: set[int] = set()  # ids of parameters: requires_grad
        self.flags_set: dict[int, set[int]] = {}  # ... and the running modules
        self.flags_last: set[int] = set()  # ... with another one now
        self.used: list[set[int]] = [set() for _ in self.modules]
        self.used_outside: set[int] = set()
        self.given_away: dict[int, set[int]] = {}  # to autograd functions, by a module
        self.hooking: dict[int, set[int]] = {}  # of a module's callees
        self.held: list[_Held] = []  # by module, at the beginning
        self.last_held: dict[int, _Held] = {}  # ... as its last execution left it
        self.put_buffers: dict[tuple[int, str], Tensor | None] = {}  # by setattr
        self.swapping: dict[int, set[int]] = {}  # a module's callees, and in these
        self.weighed: dict[int, StorageWeakRef] = {}  # by address; the reference reserves it
        self.given: dict[int, StorageWeakRef] = {}  # of the models' arguments
        self.frames = [Frame(-1, None)]
        self.executions = 0

    # ------------------------------------------------------------------------- running

    def record(self, run: Callable[[], Any]) -> None:
        """Run once and record everything but times; again, where a module needs a backward."""
        try:
            self._record(run)
        except RuntimeError as error:
            # torch.func's transforms refuse hooks on saved tensors, in these words.
            refused = "saved tensor hooks" in str(error)
            if type(error) is not _BackwardInModule and not refused:
                raise
            if refused and self.memory:
                self.memory = False
                warnings.warn(
                    f"smp: what autograd keeps is not measured: {self.running_path()} uses "
                    "torch.func, which refuses to have it seen",
                    stacklevel=4,
                )
            self.keeps_saved = True
            self._begin()
            self._record(run)

    def _record(self, run: Callable[[], Any]) -> None:
        with Restore(self.roots) as self.restore, self._hooks():
            if self.meta:
                self._put_on_meta()
            if self.memory:
                self._leave_out_state()
            self.memory_of = _by_memory(self.modules, self.parameter)
            self.registers = first_forward.Registers(self.modules, self.parameter)
            # None at the end of the run, because of Restore.__exit__.
            self.left = [_attributes_of(module) for module in self.modules]
            self.held = [_held_by(module) for module in self.modules]
            initial = list(self.left)
            boxes = self._containers_of_hooks()
            try:
                with (
                    self._saved_tensors(),
                    Operators(self),
                    watching(self.hear_collective),
                    _seeing_attributes(self._note_use),
                ):
                    run()
                self.registers.take()
                self.draws = self.restore.draws()
                self._note_what_microbatches_share(initial)
                for number, value, before in boxes:
                    if not is_the_same(before, content_of(value())):
                        holds = hook_containers.holds_tensors(value())
                        self.records[number].hooks_keep |= holds
            finally:
                self.left.clear()
                self.held.clear()
                self.last_held.clear()
                self.put_buffers.clear()
                initial.clear()
                boxes.clear()
            self.used_outside = self.frames[0].used
            for module, record in zip(self.modules, self.records, strict=True):
                if module._buffers:
                    record.changed_buffers = tuple(self.restore.changed_buffers(module))
        self.registers.keep_new()

    def measure(self, run: Callable[[], Any]) -> None:
        """Run once more with nothing but clocks."""
        self.timing = True
        with Restore(self.roots) as restore:
            restore.expect(self.restore)
            self.restore = restore
            with self._hooks(), self._saved_tensors():
                run()

    def _saved_tensors(self) -> Any:
        """Autograd runs, for the grad mode that the model expects, but keeps nothing.  No
        backward will come, and one microbatch of a whole model would not fit.

        A module may run a backward of its own (gradient penalties); then all is kept.
        """
        if self.keeps_saved and not self.memory:
            return contextlib.nullcontext()

        def keep(tensor: Tensor) -> Tensor | None:
            if self.memory and not self.timing:
                self._weigh(tensor)
            return tensor if self.keeps_saved else None

        def give(packed: Tensor | None) -> Tensor:
            return refuse(None) if packed is None else packed

        def refuse(packed: None) -> Tensor:
            kind = RuntimeError if self.frames[-1].number < 0 else _BackwardInModule
            began = "a backward began"
            instead = "write model.backward(loss), not loss.backward()"
            if _calls(torch.autograd.grad):
                began = "torch.autograd.grad was called"
                instead = (
                    "in a step gradients come from model.backward(loss) alone; take others, as "
                    "of a gradient penalty, in the forward of a module whose children are on "
                    "its rank (smp.set_partition)"
                )
            raise kind(
                f"smp: {began} in the first run of a step function, where autograd keeps "
                f"nothing: {instead}"
            )

        return torch.autograd.graph.saved_tensors_hooks(keep, give)

    def _leave_out_state(self) -> None:
        """Parameters and buffers exist with or without autograd."""
        for module in self.modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._weigh(tensor, outside=True)

    def _weigh(self, tensor: Tensor, outside: bool = False) -> None:
        """Charge the memory of a tensor to the innermost running module, once."""
        if threading.get_ident() != self.thread:
            return
        if tensor.layout in _SPARSE:
            for part in parts_of(tensor.detach()):
                self._weigh(part, outside)
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # not made yet, or has none
            if outside:
                return
            nbytes, number = tensor_bytes(tensor), self.frames[-1].number
        else:
            if storage._cdata in self.weighed:
                return
            self.weighed[storage._cdata] = StorageWeakRef(storage)
            nbytes, number = storage.nbytes(), self.frames[-1].number
            if storage._cdata in self.given:  # of a whole batch, perhaps
                nbytes = min(nbytes, tensor_bytes(tensor))
        if number >= 0 and not outside:
            self.records[number].kept_bytes += nbytes

    def _put_on_meta(self) -> None:
        """Give the modules meta tensors for parameters, until the state is restored."""
        made: dict[int, nn.Parameter] = {}  # by id of the original
        for module in self.modules:
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and is_plain(parameter) and not parameter.is_meta:
                    if id(parameter) not in made:
                        made[id(parameter)] = traced_tensors.meta_parameter(parameter)
                    setattr(module, name, made[id(parameter)])  # nn.LSTM keeps a list too
        self.twins = list(made.values())  # keeps their ids
        # Not those of an earlier run: any tensor may have their ids by now.
        self.parameter = self.own | {id(twin): original for original, twin in made.items()}

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Global hooks: outside the modules' own, and these run as usual."""
        self.frames = [Frame(-1, None)]
        self.progress = _Progress(len(self.modules))
        with contextlib.ExitStack() as stack:
            for root in self.roots:
                self._take_arguments_of(root)
            stack.enter_context(patches.traced_calls.in_block(self._enter, self._leave))
            stack.enter_context(
                patches.traced_registrations.in_block(
                    self._note_set_buffer, self._note_put_module
                )
            )
            stack.callback(self.progress.finish)
            stack.enter_context(compiled_code.run_as_written())
            stack.enter_context(_seeing_functions(self._note_given_away))
            stack.enter_context(_seeing_hooks(self._note_hooked))
            stack.enter_context(_seeing_grad_flags(self._note_flag))
            stack.enter_context(_seeing_data(self._note_set_data))
            yield

    def running_path(self) -> str:
        """The innermost module begun and not ended."""
        number = self.frames[-1].number
        return "the code outside the model" if number < 0 else self.paths[number]

    def hear_collective(self, group: dist.ProcessGroup) -> None:
        """A collective begins, perhaps in a thread of the script's apart from the run."""
        if self.check is not None and threading.get_ident() == self.thread:
            module = self.frames[-1].module
            where = "the step function"
            if module is not None:
                where = f"module '{self.running_path()}' ({type(module).__name__})"
            self.check(where, dist.get_process_group_ranks(group))

    def _note_given_away(self, args: tuple) -> None:
        giver = self.frames[-1].number
        if giver < 0 or threading.get_ident() != self.thread:
            return
        leaves = pytree.tree_leaves(args, is_leaf=lambda a: isinstance(a, nn.Module))
        for module in leaves:
            if isinstance(module, nn.Module):
                inside = {id(m) for m in module.modules()} & self.number_of.keys()
                given = self.given_away.setdefault(giver, set())
                given.update(self.number_of[m] for m in inside)

    def _note_hooked(self, tensor: Tensor) -> None:
        if threading.get_ident() == self.thread:
            for frame in self.frames:
                frame.hooked[id(tensor)] = tensor

    def _note_flag(self, tensor: Tensor, value: bool | None = None) -> None:
        """Code sets a tensor's ``requires_grad``; None: reads it."""
        parameter = self.parameter.get(id(tensor))
        if parameter is None or threading.get_ident() != self.thread:
            return
        if value is None:
            if parameter not in self.flags_set:
                self.flags_read.add(parameter)
        elif value is not _requires_grad(tensor):
            self.flags_set.setdefault(parameter, set()).add(self.frames[-1].number)
            self.flags_last ^= {parameter}

    def _note_set_data(self, tensor: Tensor, data: Tensor) -> Tensor:
        """Code sets a tensor's ``data``, which changes the tensor.  The data to be set."""
        if is_lazy(tensor):  # it gets its first
            return data
        self.restore.before_set_data(tensor)
        parameter = self.parameter.get(id(tensor))
        if parameter is None or self.timing or threading.get_ident() != self.thread:
            return data
        self.frames[-1].used.add(parameter)
        self.written.add(parameter)
        return traced_tensors.as_meta(data) if tensor.is_meta else data

    def _note_set_buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        """Setting a buffer is a use of it."""
        place = self.number_of.get(id(module), -1), name
        if place in self.buffer_of and threading.get_ident() == self.thread:
            self.put_buffers[place] = buffer
            self.frames[-1].used.add(self.buffer_of[place])

    def _note_put_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """A new module's contents at the time of its placing are put back, too."""
        if module is not None and not self.timing and threading.get_ident() == self.thread:
            for new in self.registers.add(module):
                self.restore.watch_module(new)

    def _take_arguments_of(self, root: nn.Module) -> None:
        """Watch a root's arguments; on meta, replace them by meta tensors.

        Integers stay: models look into token ids and masks.  Not by a hook of the module:
        ``nn.TransformerEncoderLayer`` takes another path if it has one, and global hooks do not
        see keyword arguments.
        """
        forward = root.forward

        @functools.wraps(forward)
        def taking(*args: Any, **kwargs: Any) -> Any:
            self.restore.watch(args)
            self.restore.watch(kwargs)
            if self.meta:
                args, kwargs = pytree.tree_map_only(
                    Tensor,
                    lambda t: t.to("meta") if t.is_floating_point() else t,
                    (args, kwargs),
                )
            if self.memory:
                for tensor in tensors_in((args, kwargs)):
                    if tensor.layout is torch.strided:
                        storage = tensor.untyped_storage()
                        self.given[storage._cdata] = StorageWeakRef(storage)
            return forward(*args, **kwargs)

        root.__dict__["forward"] = taking  # put back with all other attributes

    def _enter(self, module: nn.Module, args: tuple) -> None:
        number = self.number_of.get(id(module))
        if number is None:
            return
        if not self.timing:
            record = self.records[number]
            if record.executions == 0:
                record.first = self.executions
            record.executions += 1
            self.executions += 1
        if threading.get_ident() != self.thread:
            return  # of a module's own, where no operators are seen: they come in no order
        frame = Frame(number, module)
        if not self.timing:
            caller = self.frames[-1].number
            if caller >= 0 and torch._C._functorch.peek_interpreter_stack() is not None:
                self.hooking.setdefault(caller, set()).add(number)
            self._note_swaps(module)
            self._note_changes(number, self.left[number], frame.attributes, by_others=True)
        self.frames.append(frame)
        self.progress.enter(self.paths[number])
        if self.timing:
            _wait_for_device(module)
        frame.started = time.perf_counter()

    def _note_swaps(self, module: nn.Module) -> None:
        """Its caller may have put other tensors into modules of this call."""
        caller = self.frames[-1].number
        if caller < 0:
            return
        swapped = {n for n in self._numbers_in(module) if self._is_swapped(n)}
        if not swapped:
            return
        found = self.swapping.setdefault(caller, set())
        for path, inside in module.named_modules():
            if self.number_of.get(id(inside)) in swapped:
                parts = path.split(".")
                between = (".".join(parts[:i]) for i in range(len(parts) + 1))
                found |= {self.number_of[id(module.get_submodule(one))] for one in between}

    def _numbers_in(self, module: nn.Module) -> Iterator[int]:
        numbers = (self.number_of.get(id(inside)) for inside in module.modules())
        return (number for number in numbers if number is not None)

    def _is_swapped(self, number: int) -> bool:
        """Whether other code than its own has put tensors into its parameters' places, or
        others' than by ``setattr`` into those of its buffers.

        A parameter in a place without one is made by the first forward.
        """
        module = self.modules[number]
        last = self.last_held.get(number, {})
        for name, before in self.held[number].items():
            now = module._parameters.get(name, module._buffers.get(name))
            if now is before or now is last.get(name, before):
                continue
            made = before is None and isinstance(now, nn.Parameter)
            if not made and now is not self.put_buffers.get((number, name), before):
                return True
        return False

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        number = self.number_of.get(id(module))
        if number is None or threading.get_ident() != self.thread:
            return
        if self.timing:
            _wait_for_device(module)
        now = time.perf_counter()
        # A forward whose exception was caught left its frame behind.
        while self.frames[-1].module is not module:
            left = self.frames.pop()
            self.used[left.number] |= left.used
        frame = self.frames.pop()
        record = self.records[number]
        if self.timing:
            elapsed = now - frame.started
            record.total_seconds += elapsed
            record.seconds += elapsed - frame.calls_s
            self.frames[-1].calls_s += elapsed
        else:
            # A parameter passed in is a value like any other: its caller needs the data, not
            # the module called.
            passed = {
                self.parameter[id(t)]
                for t in tensors_in((args, kwargs))
                if id(t) in self.parameter
            }
            self.used[number] |= frame.used - passed
            self.frames[-1].used |= passed
            if any(id(t) in frame.hooked for t in tensors_in((args, kwargs, output))):
                self.hooking.setdefault(self.frames[-1].number, set()).add(number)
            self.left[number] = _attributes_of(module)
            self.last_held[number] = _held_by(module)
            self._note_changes(number, frame.attributes, self.left[number])
            record.input_bytes = max(record.input_bytes, tensor_bytes((args, kwargs)))
            record.output_bytes = max(record.output_bytes, tensor_bytes(output))

    def _containers_of_hooks(self) -> list[tuple[int, Callable[[], Any], Any]]:
        """Number of a module, a container of its hooks, and the content of that now."""
        found = []
        for number, module in enumerate(self.modules):
            for value in hook_containers.of_module(module):
                found.append((number, value, content_of(value())))
        return found

    def _note_use(self, module: nn.Module, name: str, sets: bool) -> None:
        """Code reads an attribute of a module, or sets one."""
        number = self.number_of.get(id(module))
        if number is None or threading.get_ident() != self.thread:
            return
        its = object.__getattribute__(module, "__dict__")
        held = name in its or name in its["_buffers"]
        if not held and not sets and hasattr(getattr(type(module), name, None), "__get__"):
            return  # a method
        uses = self.uses.get((number, name))
        if uses is None:
            uses = self.uses[number, name] = _Uses(read_first=not sets)
        uses.count += 1
        uses.sets |= sets
        if not uses.outside:
            uses.outside = all(frame.number != number for frame in self.frames)

    def _note_what_microbatches_share(self, initial: list[_Attributes]) -> None:
        """Sort the attributes: set anew by each microbatch, or left by one to the next."""
        for (number, name), uses in self.uses.items():
            module, record = self.modules[number], self.records[number]
            its = module.__dict__
            if uses.outside and name in its["_buffers"]:
                record.outside_reads += (name,)
            if name in its["_parameters"] or name in its["_modules"] or name in its["_buffers"]:
                continue
            default = getattr(type(module), name, _NEVER[0])
            before = initial[number].get(name, (default, default))
            value = its.get(name, default)
            same = is_the_same(before[1], content_of(value))
            if not uses.sets or (value is before[0] and can_change(value)):
                if not same:  # in place
                    record.grows = True
                    if uses.outside:
                        record.outside_reads += (name,)
            elif not same and uses.read_first:
                record.carried_attributes[name] = uses.count
                if uses.outside:
                    record.outside_reads += (name,)
            elif same:
                record.restored_attributes += (name,)
            else:
                record.own_attributes += (name,)

    def _note_changes(
        self, number: int, before: _Attributes, after: _Attributes, by_others: bool = False
    ) -> None:
        """Note changes of a module's attributes.

        Args:
            by_others: between its executions.  An attribute set then may travel with the next
                call (modules/changes.py); a change in place cannot.
        """
        names = [
            name
            for name, (value, content) in after.items()
            if not is_the_same(before.get(name, _NEVER)[1], content)
            and (not by_others or (name in before and before[name][0] is value))
        ]
        if names:
            record = self.records[number]
            record.set_attributes = tuple(dict.fromkeys((*record.set_attributes, *names)))

    # ------------------------------------------------------------------------- results

    def traces(self, timed: bool) -> list[Trace]:
        """The recorded run as one trace for each root."""
        out = []
        made, makes = b"", ""
        if self.registers.changed:
            made = first_forward.packed(self.roots, self.registers, self.parameter)
            makes = first_forward.described(self.roots, self.registers)
        for root in self.roots:
            names = {id(p): name for name, p in root.named_parameters()}

            def name_all(used: set[int], names: dict[int, str] = names) -> tuple[str, ...]:
                return tuple(sorted(names[p] for p in used if p in names))

            changed = {
                id(module._buffers[name]): f"{path}.{name}".lstrip(".")
                for path, module in root.named_modules()
                for name in self.records[self.number_of[id(module)]].changed_buffers
            }
            modules = {}
            for path, module in root.named_modules():
                number = self.number_of[id(module)]
                record = self.records[number]
                record.parameters = name_all(self.used[number])
                record.buffers = name_all(self.used[number], changed)
                record.changed_parameters = name_all(self.used[number] & self.written)
                modules[path] = record
            for path, module in root.named_modules():
                number = self.number_of[id(module)]
                given = self.given_away.get(number, set())
                if any(self.records[n].set_attributes for n in given):
                    modules[path].reruns = self._paths_of(given, root)
                modules[path].hooking = self._paths_of(self.hooking.get(number, ()), root)
                modules[path].swapping = self._paths_of(self.swapping.get(number, ()), root)
            weighed = any(record.kept_bytes for record in modules.values())
            outside = name_all(self.used_outside)
            flags = self._grad_flags(root)
            out.append(
                Trace(
                    modules,
                    outside,
                    flags,
                    timed,
                    self.meta,
                    weighed,
                    made,
                    makes,
                    self.draws,
                )
            )
        return out

    def _grad_flags(self, root: nn.Module) -> dict[str, GradFlag]:
        if not self.flags_set:
            return {}
        path_of = {self.number_of[id(m)]: path for path, m in root.named_modules()}
        return {
            name: GradFlag(
                tuple(path_of.get(number) for number in sorted(self.flags_set[id(parameter)])),
                id(parameter) in self.flags_read,
                id(parameter) in self.flags_last,
            )
            for name, parameter in root.named_parameters()
            if id(parameter) in self.flags_set
        }

    def _paths_of(self, numbers: Collection[int], root: nn.Module) -> tuple[str, ...]:
        if not numbers:
            return ()
        within = root.named_modules()
        return tuple(path for path, m in within if self.number_of[id(m)] in numbers)


def _seeing_functions(see: Callable[[tuple], None]) -> AbstractContextManager[None]:
    """Show the arguments of autograd functions other than PyTorch's own."""

    def around(plain: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not cls.__module__.startswith("torch."):
                see(args)
            return plain.__get__(None, cls)(*args, **kwargs)

        return classmethod(apply)

    return patches.traced_functions.in_block(around)


def _seeing_attributes(
    see: Callable[[nn.Module, str, bool], None],
) -> AbstractContextManager[None]:
    """Show each read or set (True) of a module's attribute by code, but not of torch's own."""

    def reading(plain: Any) -> Any:
        def __getattribute__(self: nn.Module, name: str) -> Any:
            if name not in _NOT_SEEN:
                see(self, name, False)
            return super(nn.Module, self).__getattribute__(name)

        return __getattribute__

    def writing(plain: Any) -> Any:
        def __setattr__(self: nn.Module, name: str, value: Any) -> None:
            if name not in _NOT_SEEN:
                see(self, name, True)
            plain(self, name, value)

        return __setattr__

    return patches.traced_attributes.in_block(reading, writing)


_flag: Any = torch._C.TensorBase.requires_grad  # type: ignore[attr-defined]


def _requires_grad(tensor: Tensor) -> bool:
    """Its flag, without :func:`_seeing_grad_flags` seeing the read."""
    return bool(_flag.__get__(tensor))


def _seeing_grad_flags(see: Callable[..., None]) -> AbstractContextManager[None]:
    """Show each tensor with ``requires_grad`` read by code, and with the value, set."""

    def read(self: Tensor) -> bool:
        see(self)
        return _requires_grad(self)

    def write(self: Tensor, value: bool) -> None:
        see(self, value)
        _flag.__set__(self, value)

    def setting(plain: Any) -> Any:
        def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
            see(self, requires_grad)
            return plain(self, requires_grad)

        return requires_grad_

    return patches.traced_grad_flags.in_block(lambda plain: property(read, write), setting)


def _seeing_data(see: Callable[[Tensor, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Show each set of a tensor's ``data`` by code; the function gives those to be set."""

    def around(plain: Any) -> Any:
        def write(self: Tensor, data: Tensor) -> None:
            plain.__set__(self, see(self, data))

        return property(plain.__get__, write)

    return patches.traced_data.in_block(around)


def _seeing_hooks(see: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """Show the tensors with a call of ``register_hook``.  PyTorch's own tools, such as FLOP
    counters, hook every module's tensors and are not shown, nor are ours.
    """

    def around(plain: Any) -> Any:
        def register_hook(self: Tensor, hook: Callable) -> Any:
            if not str(getattr(hook, "__module__", "")).startswith(("torch.", "smp.")):
                see(self)
            return plain(self, hook)

        return register_hook

    return patches.traced_tensor_hooks.in_block(around)


def _calls(function: Callable) -> bool:
    """Whether this thread is inside a call of the function."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _by_memory(modules: Sequence[nn.Module], parameter: dict[int, int]) -> dict[int, int]:
    """By address of its storage: the id of a parameter; ``p.data`` has the same storage."""
    found: dict[int, int] = {}
    for module in modules:
        for tensor in module._parameters.values():
            if tensor is not None and tensor.layout is torch.strided and not is_lazy(tensor):
                found[tensor.untyped_storage()._cdata] = parameter[id(tensor)]
    return found


def _held_by(module: nn.Module) -> _Held:
    """Its parameters and buffers."""
    return {**module._parameters, **module._buffers}


def _attributes_of(module: nn.Module) -> _Attributes:
    return {
        name: (value, value if name in _OF_TORCH else content_of(value))
        for name, value in module.__dict__.items()
    }


class _Progress:
    """A line on stderr for a long run; in a log file it is written once."""

    def __init__(self, modules: int):
        self.modules = modules
        self.entered = 0
        self.started = self.noted = time.perf_counter()
        self.shown = False
        self.terminal = sys.stderr.isatty()

    def enter(self, path: str) -> None:
        self.entered += 1
        now = time.perf_counter()
        if now - self.started < _PATIENCE_S or now - self.noted < _NOTE_EVERY_S:
            return
        if self.shown and not self.terminal:
            return
        self.noted = now
        self.shown = True
        self._write(
            f"smp: tracing the model, {now - self.started:.0f} s: execution {self.entered}, "
            f"{self.modules} modules ({path})"
        )

    def finish(self) -> None:
        if self.shown:
            self._write(f"smp: traced the model in {time.perf_counter() - self.started:.1f} s")
            if self.terminal:
                print(file=sys.stderr)

    def _write(self, line: str) -> None:
        if self.terminal:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _wait_for_device(module: nn.Module) -> None:
    """Wait for an accelerator, so its time is charged to the module at work."""
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(parameter.device)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``: a tensor, or any nesting of lists, tuples, dicts and
    dataclasses; anything else holds none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in ``value``, see :func:`tensors_in`; of a sparse one those of its
    indices and values."""
    total = 0
    for tensor in tensors_in(value):
        parts = parts_of(tensor.detach()) if tensor.layout in _SPARSE else (tensor,)
        total += sum(part.numel() * part.element_size() for part in parts)
    return total
