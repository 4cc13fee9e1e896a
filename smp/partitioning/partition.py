"""The decision on the rank of the PP_GROUP for each module of a model.

A model and its trace become the flat arrays of ``csrc/partition``; the user's pins are kept
here.
"""

import json
import warnings
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from smp import _core
from smp.marks import PIN, TOGETHER
from smp.modules.pins import PartitionError
from smp.partitioning.tracing import ModuleTrace, Trace
from smp.slicing.split_parameters import is_plain

if TYPE_CHECKING:
    from smp.partitioning.shared import Home

_INHERIT, _NOT_PINNED = -1, -2  # SMP_PIN_INHERIT, SMP_PIN_NONE
_MAGIC = b"smp partition 1\n"
_NOT_TRACED = ModuleTrace()
_OUTLIER = 4  # times the mean flops: above a T5 block's largest module, below heads


# ------------------------------------------------------------------------- the decision


class Partition:
    """The rank of the PP_GROUP for each module, and each module's cost.

    Attributes:
        degree: number of partitions.
        memory_weight: the paper's alpha.
        paths: of all modules, as in ``named_modules()``.
        ranks: pp_rank of each module, in the order of ``paths``.
        classes: class name of each module.
        parameters: number of elements of the parameters of each module itself, one
            shared with an earlier module counting there.
        own_costs: each module's part of the model's cost of 1, without the modules in it.
        order: position of each module's first execution; -1: unknown.
        costs: by rank, the cost of its modules.
        kept_bytes: autograd's memory for each module's own backward of one microbatch; empty
            where not measured.
        hash: 64 bits of paths and ranks, for the ranks to compare.
    """

    def __init__(
        self,
        degree: int,
        memory_weight: float,
        paths: list[str],
        classes: list[str],
        ranks: Iterable[int],
        parameters: Iterable[int],
        own_costs: Iterable[float],
        order: Iterable[int],
        costs: Iterable[float],
        kept_bytes: Iterable[int] = (),
    ):
        self.degree = degree
        self.memory_weight = memory_weight
        self.paths = paths
        self.classes = classes
        self.ranks = array("i", ranks)
        self.parameters = array("q", parameters)
        self.own_costs = array("d", own_costs)
        self.order = array("q", order)
        self.costs = list(costs)
        self.kept_bytes = array("q", kept_bytes)
        self.rank_of: dict[str, int] = dict(zip(paths, self.ranks, strict=True))
        self.hash: int = _core.partition_hash(self.ranks, "\0".join(paths).encode())

    def to_bytes(self) -> bytes:
        """The partition as plain numbers and strings, for :meth:`from_bytes`."""
        header = {
            "degree": self.degree,
            "memory_weight": self.memory_weight,
            "hash": self.hash,
            "costs": self.costs,
            "paths": self.paths,
            "classes": self.classes,
            "ranks": self.ranks.tolist(),
            "parameters": self.parameters.tolist(),
            "own_costs": self.own_costs.tolist(),
            "order": self.order.tolist(),
            "kept_bytes": self.kept_bytes.tolist(),
        }
        return _MAGIC + json.dumps(header, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "Partition":
        """The partition written by :meth:`to_bytes`.

        Raises:
            ValueError: the bytes are something else, or were changed on the way.
        """
        data = bytes(data)
        if not data.startswith(_MAGIC):
            raise ValueError("smp: these bytes are no partition")
        try:
            fields = json.loads(data[len(_MAGIC) :])
            sent = fields.pop("hash")
            out = cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"smp: a partition arrived damaged: {error}") from error
        if out.hash != sent:
            raise ValueError(
                f"smp: a partition arrived damaged: its hash is {out.hash:#x}, not {sent:#x}"
            )
        return out


def make_partition(
    root: nn.Module,
    trace: Trace | None,
    *,
    degree: int,
    memory_weight: float,
    default: int | None = None,
    auto: bool = True,
    homes: Mapping[int, "Home"] | None = None,
) -> Partition:
    """Decide about all modules of ``root``.

    Args:
        root: the model.
        trace: its traced run, or None: then the order of definition counts, and neither
            activations nor times do.
        degree: number of partitions.
        memory_weight: the paper's alpha: 1 balances memory, 0 computation.
        default: partition of modules without a pin, when ``auto`` is false.
        auto: decide about modules without a pin.
        homes: by id of a module, parameter or buffer, its place in another model.

    Raises:
        PartitionError: pins out of range, or at odds with a shared parameter or with another
            model's place for a shared part.
        ValueError: ``degree``, ``memory_weight`` or ``default`` is out of range.
    """
    if degree < 1:
        raise ValueError(f"smp: pipeline_parallel_degree must be at least 1, got {degree}")
    if not 0 <= memory_weight <= 1:
        raise ValueError(f"smp: memory_weight must be between 0 and 1, got {memory_weight}")
    default = -1 if auto else default or 0
    if default >= degree:
        raise ValueError(
            "smp: default_partition must be below pipeline_parallel_degree "
            f"{degree}, got {default}"
        )
    model = _FlatModel(root, trace)
    pins = model.pins(degree, auto)
    if homes:
        model.pin_shared(pins, homes)
    timed = trace is not None and trace.timed

    def decide() -> tuple:
        return _core.partition(
            degree,
            memory_weight,
            default,
            len(model.paths),
            model.edge_parent,
            model.edge_child,
            model.parameter_bytes,
            model.use_module,
            model.use_parameter,
            first_run=model.order,
            activation_bytes=model.kept_bytes or model.activation_bytes,
            seconds=model.seconds if timed else model.works(),
            chain=model.chain,
            pin=pins,
        )

    while True:
        try:
            device, _, own_cost, cost = decide()
            break
        except _core.PartitionConflict as conflict:
            # A pin is the user's word, a use is the finding of one traced run: a parameter
            # passed as an argument is used by a module that can be elsewhere.
            if not model.drop_uses(*conflict.args):
                raise PartitionError(model.explain_conflict(pins, *conflict.args)) from None
    out = Partition(
        degree,
        memory_weight,
        model.paths,
        model.classes,
        array("i", device),
        model.own_elements,
        array("d", own_cost),
        model.order,
        array("d", cost),
        model.kept_bytes,
    )
    _warn_about_idle_ranks(out, root)
    return out


class _FlatModel:
    """A model as the arrays of ``csrc/partition/partition.h``."""

    def __init__(self, root: nn.Module, trace: Trace | None):
        named = dict(root.named_modules())
        self.paths = list(named)
        self.modules = list(named.values())
        self.classes = [type(m).__name__ for m in self.modules]
        self.number_of = {id(m): i for i, m in enumerate(self.modules)}
        self.edge_parent, self.edge_child = array("i"), array("i")
        self.first_parent: dict[int, int] = {}
        for number, module in enumerate(self.modules):
            for child in module._modules.values():
                if child is not None:
                    self.edge_parent.append(number)
                    self.edge_child.append(self.number_of[id(child)])
                    self.first_parent.setdefault(self.edge_child[-1], number)
        self.chain = array(
            "b",
            [
                isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward
                for m in self.modules
            ],
        )
        self._collect_parameters()
        self._collect_uses(root, trace)
        self._collect_inseparable(trace)
        self.buffer_names: dict[int, str] = {}  # by number among the parameters
        self.shared: dict[int, Home] = {}  # by number of a module
        if trace is not None:
            self._collect_buffers(root, trace)
        traces = {} if trace is None else trace.modules
        seen = [traces.get(path, _NOT_TRACED) for path in self.paths]
        self.order = array("q", [t.first for t in seen])
        self.activation_bytes = array("q", [t.activation_bytes for t in seen])
        weighed = trace is not None and trace.weighed
        self.kept_bytes = array("q", [t.kept_bytes for t in seen] if weighed else [])
        self.seconds = array("d", [t.seconds for t in seen])
        self.flops = [t.flops for t in seen]

    def works(self) -> array | None:
        """A weight for each module's time: 1, as the paper has it, but for outliers.

        A language model's head may have the flops of several blocks.  An outlier has more than
        ``_OUTLIER`` times the mean flops of modules with some.  It weighs as many of the other
        modules as have its flops.  None: there are no outliers, or some flops are not known.
        """
        if any(map(self._is_uncounted, range(len(self.flops)))):
            return None
        limit = _OUTLIER * sum(self.flops) / max(1, sum(flops > 0 for flops in self.flops))
        others = [flops for flops in self.flops if flops <= limit]
        if len(others) == len(self.flops) or sum(others) == 0:
            return None
        of_each = sum(others) / len(others)
        weights = (flops / of_each if flops > limit else 1.0 for flops in self.flops)
        return array("d", weights)

    def _is_uncounted(self, number: int) -> bool:
        """Whether a module has weights, and ran, but without an operator with known flops."""
        if self.flops[number] or self.order[number] < 0:
            return False
        own = self.modules[number]._parameters.values()
        matrices = any(p is not None and p.dim() > 1 for p in own)
        return matrices and "Embedding" not in self.classes[number]

    def _collect_parameters(self) -> None:
        """Number the parameters; one object, or one memory, has one number."""
        self.parameter_of: dict[int, int] = {}  # id -> number
        by_memory: dict[tuple[int, int], int] = {}
        self.parameter_bytes = array("q")
        self.own_elements = array("q", [0]) * len(self.modules)
        self.use_module, self.use_parameter = array("i"), array("i")
        for number, module in enumerate(self.modules):
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                if id(parameter) not in self.parameter_of:
                    self._add_parameter(parameter, number, by_memory)
                self._add_use(number, parameter)

    def _add_parameter(
        self, parameter: Tensor, module: int, by_memory: dict[tuple[int, int], int]
    ) -> None:
        elements = size = 0
        if not is_lazy(parameter):
            elements = parameter.numel()
            size = elements * parameter.element_size()
        number = len(self.parameter_bytes)
        if size > 0 and not parameter.is_meta and is_plain(parameter):
            number = by_memory.setdefault((parameter.data_ptr(), size), number)
        self.parameter_of[id(parameter)] = number
        if number == len(self.parameter_bytes):
            self.parameter_bytes.append(size)
            self.own_elements[module] += elements

    def _add_use(self, module: int, parameter: Tensor) -> None:
        self.use_module.append(module)
        self.use_parameter.append(self.parameter_of[id(parameter)])

    def _collect_uses(self, root: nn.Module, trace: Trace | None) -> None:
        """Add the modules' uses of parameters that they do not own."""
        for number, module in enumerate(self.modules):
            for parameter in _used_without_a_call(module):
                self._add_use(number, parameter)
        if trace is None:
            return
        named = dict(root.named_parameters())
        for number, path in enumerate(self.paths):
            traced = trace.modules.get(path)
            if traced is None or not traced.parameters:
                continue
            own = {id(p) for p in self.modules[number]._parameters.values()}
            for name in traced.parameters:
                if name in named and id(named[name]) not in own:
                    self._add_use(number, named[name])

    def _collect_inseparable(self, trace: Trace | None) -> None:
        """Modules kept together use one parameter more, of no size.

        So do a module and the modules called again by its autograd function in the backward:
        these read attributes set by their forwards.  So do a module and the modules called by
        it with hooks on a tensor of both, or with other tensors in their parameters' places.
        """
        self.swaps: dict[int, str] = {}  # by number among the parameters: in words
        together = [
            [self.number_of[id(inside)] for inside in module.modules()]
            for module in self.modules
            if module.__dict__.get(TOGETHER, False)
        ]
        for number, path in enumerate(self.paths):
            seen = _NOT_TRACED if trace is None else trace.modules.get(path, _NOT_TRACED)
            for others in (seen.reruns, seen.hooking):
                if others:
                    together.append([number, *map(self.paths.index, others)])
            if seen.swapping:
                self.swaps[len(self.parameter_bytes) + len(together)] = (
                    f"the tensors of {seen.swapping[-1]!r}, replaced by {path!r} for a call "
                    "(as torch.func.functional_call does),"
                )
                together.append([number, *map(self.paths.index, seen.swapping)])
        for numbers in together:
            self.use_module.extend(numbers)
            self.use_parameter.extend([len(self.parameter_bytes)] * len(numbers))
            self.parameter_bytes.append(0)

    def _collect_buffers(self, root: nn.Module, trace: Trace) -> None:
        """Number the changing buffers of several modules, as parameters.

        A buffer without changes is alike on all ranks.
        """
        named = dict(root.named_buffers(remove_duplicate=False))
        users: dict[int, set[int]] = {}
        names: dict[int, str] = {}
        for number, path in enumerate(self.paths):
            seen = trace.modules.get(path, _NOT_TRACED)
            own = [f"{path}.{name}".lstrip(".") for name in seen.changed_buffers]
            for name in (*own, *seen.buffers):
                users.setdefault(id(named[name]), set()).add(number)
                names.setdefault(id(named[name]), name)
        for buffer, modules in users.items():
            if len(modules) > 1:
                self.parameter_of[buffer] = len(self.parameter_bytes)
                self.buffer_names[len(self.parameter_bytes)] = names[buffer]
                self.parameter_bytes.append(named[names[buffer]].nbytes)
                for module in sorted(modules):
                    self._add_use(module, named[names[buffer]])

    def drop_uses(self, a: int, b: int) -> bool:
        """Forget the two modules' uses of parameters that they do not own; False: none."""
        kept = [
            (module, parameter)
            for module, parameter in zip(self.use_module, self.use_parameter, strict=True)
            if module not in (a, b) or parameter in self.swaps or self._owns(module, parameter)
        ]
        if len(kept) == len(self.use_module):
            return False
        self.use_module = array("i", (module for module, _ in kept))
        self.use_parameter = array("i", (parameter for _, parameter in kept))
        return True

    def _owns(self, module: int, parameter: int) -> bool:
        held = self.modules[module]
        return any(
            t is not None and self.parameter_of.get(id(t)) == parameter
            for t in (*held._parameters.values(), *held._buffers.values())
        )

    def pins(self, degree: int, auto: bool) -> array:
        """Each module's pin for the core.

        Without ``auto`` a module created outside every ``smp.partition`` belongs to the default
        partition, wherever it was registered later.
        """
        out = array("i")
        inherited: dict[int, bool] = {0: False}  # by a set_partition above
        for number, module in enumerate(self.modules):
            pin = module.__dict__.get(PIN)
            if pin is not None and pin.partition >= degree:
                raise PartitionError(
                    f"smp: module {self.paths[number]!r} is pinned to partition "
                    f"{pin.partition}, but pipeline_parallel_degree is {degree}"
                )
            below = inherited.get(number, False) if pin is None else not pin.by_context
            for child in module._modules.values():
                if child is not None:
                    inherited.setdefault(self.number_of[id(child)], below)
            if pin is not None:
                out.append(pin.partition)
            else:
                out.append(_INHERIT if auto or below else _NOT_PINNED)
        return out

    def pin_shared(self, pins: array, homes: Mapping[int, "Home"]) -> None:
        """Pin parts shared with another model to their rank there.

        Modules inside one with only a shared parameter are pinned as without it.

        Raises:
            PartitionError: a shared part is pinned elsewhere here, or two such are apart there.
        """
        users = self._inherited(pins)
        in_part: set[int] = set()
        for number, module in enumerate(self.modules):
            held = (module, *module._parameters.values(), *module._buffers.values())
            found = [homes[id(thing)] for thing in held if id(thing) in homes]
            if found:
                self._check_homes(number, pins, users[number], found)
                self.shared[number] = found[0]
                pins[number] = found[0].rank
                if id(module) not in homes:
                    in_part.add(number)
            elif pins[number] == _INHERIT and self.first_parent.get(number) in in_part:
                pins[number] = users[number]

    def _inherited(self, pins: array) -> array:
        """Each module's pin, its own or the one of those above."""
        out = array("i")
        for number, pin in enumerate(pins):
            above = out[self.first_parent[number]] if number else _NOT_PINNED
            out.append(above if pin == _INHERIT else pin)
        return out

    def _check_homes(self, number: int, pins: array, pin: int, found: list["Home"]) -> None:
        """
        Raises:
            PartitionError: a module's shared parts are not on its pinned rank, or not on one.
        """
        wanted = found[0].rank if pin < 0 else pin
        other = next((home for home in found if home.rank != wanted), None)
        if other is None:
            return
        module = self._pinned(pins, number) if pin >= 0 else repr(self.paths[number])
        also = "" if pin >= 0 else f", and has the {found[0].described()}"
        verb = "is" if other.kind == "module" else "has"
        raise PartitionError(
            f"smp: module {module} {verb} the {other.described()}{also}: what models share is "
            "on one rank; before the first step, pin it to the same partition in all models, "
            "or in one of them only"
        )

    def explain_conflict(self, pins: array, a: int, b: int) -> str:
        """The message for two pinned modules with a common parameter."""
        uses: dict[int, set[int]] = {a: set(), b: set()}
        for module, parameter in zip(self.use_module, self.use_parameter, strict=True):
            if module in uses:
                uses[module].add(parameter)
        shared = [
            f"the buffer {self.buffer_names[number]!r}"
            for number in uses[a] & uses[b] & self.buffer_names.keys()
        ]
        shared += [self.swaps[number] for number in uses[a] & uses[b] & self.swaps.keys()]
        shared += [
            f"the parameter {f'{path}.{name}'.lstrip('.')!r}"
            for path, module in zip(self.paths, self.modules, strict=True)
            for name, p in module._parameters.items()
            if p is not None and self.parameter_of[id(p)] in uses[a] & uses[b]
        ]
        what = shared[0] if shared else "parameters, by way of others"
        return (
            f"smp: modules {self._pinned(pins, a)} and {self._pinned(pins, b)} share {what} "
            "and so sit on one rank; pin both to the same partition, or only one of them"
        )

    def _pinned(self, pins: array, module: int) -> str:
        """A module with its pin, and with the pin's source."""
        at = module
        while pins[at] < 0:
            at = self.first_parent[at]
        source = "" if at == module else f" with {self.paths[at]!r}"
        where = f"pinned to partition {pins[at]}{source}"
        if at in self.shared:
            where = f"{source} by the {self.shared[at].described()}".lstrip()
        return f"{self.paths[module]!r} ({where})"


def _used_without_a_call(module: nn.Module) -> list[Tensor]:
    """Parameters of other modules, known to be used by this one without a call."""
    out: list[Tensor] = []
    for child in module._modules.values():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            out += child.parameters(recurse=False)
    if isinstance(module, nn.MultiheadAttention):
        out += module.out_proj.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        out += module.parametrizations.parameters()  # type: ignore[union-attr]
    return out


def _warn_about_idle_ranks(partition: Partition, root: nn.Module) -> None:
    used = set(partition.ranks)
    idle = [rank for rank in range(partition.degree) if rank not in used]
    if idle:
        warnings.warn(
            f"smp: no module of {type(root).__name__} is on partition "
            f"{', '.join(map(str, idle))} of {partition.degree}: it has too few modules with "
            "parameters of their own, or all are pinned elsewhere",
            stacklevel=3,
        )
