"""Splitting a user's model: in place, or with a distributed form in its place.

A *plan* of its family cuts a module in place (``smp/nn/huggingface``, one file a family): a
function that cuts a module's linears and makes it a region.  A registered class is replaced
(``smp.tensor_parallel.splits.replacement``).  In models without either, each linear and
embedding is
split by itself.  A TP_GROUP of one rank splits nothing, and replaces as others do: scripts
reach for parts of the distributed forms.
"""

import functools
import importlib
import importlib.util
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from smp.collectives import objects
from smp.marks import BY_ROWS, HELD, PATH, REGION, TENSOR_PARALLELISM
from smp.modules import delayed_init
from smp.modules.pins import keep_together
from smp.modules.stand_ins import users_class
from smp.pytorch import compiled_code
from smp.ranks import CommGroup
from smp.slicing import split_parameters
from smp.slicing.slices import slices_of
from smp.tensor_parallel import group
from smp.tensor_parallel.rows import adapters, inside_regions
from smp.tensor_parallel.rows.linears import TooShort
from smp.tensor_parallel.splits import changed, leaf_trial, marking, replacement
from smp.tensor_parallel.splits.distributed_module import DistributedModule

FAMILIES = "smp.nn.huggingface"

Plan = Callable[[nn.Module, str], None]  # cuts the module at a path


class Outcome(NamedTuple):
    """The outcome for a marked module."""

    path: str
    class_name: str
    reason: str  # the reason for a whole module; "": it was split


# Splits one module by itself; with True by rows, as tied embeddings and linears are.
_leaves: dict[type[nn.Module], Callable[..., None]] = {}

# Modules with reads of their own of their children's weights.
_USE_CHILDRENS_WEIGHTS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


def register_leaf(cls: type[nn.Module], split: Callable[..., None]) -> None:
    """Have marked modules of this class split by ``split(module, by_rows)``.

    Instances of a subclass are split where a trial shows that they can be.
    """
    _leaves[cls] = split


class Split(NamedTuple):
    """A model after its split.

    Attributes:
        model: another one where a distributed module replaces all of it.
        outcomes: for each marked module that could be split by itself.
        replaced: by module, the one in its place.
    """

    model: nn.Module
    outcomes: list[Outcome]
    replaced: dict[nn.Module, nn.Module]


def split(model: nn.Module) -> Split:
    """Split the marked modules.  Collective over the TP_GROUP."""
    splitting = _Splitting(model)
    splitting.run()
    out = splitting.out
    if group.size() == 1:
        out = [one for one in out if one.reason]
    return Split(splitting.model, out, splitting.replaced)


class _Splitting:
    def __init__(self, model: nn.Module) -> None:
        self.compiled = compiled_code.Lifted(model)
        self.model = model = self.compiled.root
        self.owners: dict[int, list[nn.Module]] = defaultdict(list)  # of a parameter, by id
        self.paths = {module: path for path, module in model.named_modules()}
        self.parents: dict[nn.Module, list[nn.Module]] = defaultdict(list)
        for module in self.paths:
            for child in module.children():
                self.parents[child].append(module)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners[id(parameter)].append(module)
        self.changed: dict[nn.Module, str] = {}  # why modules are left whole
        self.out: list[Outcome] = []
        self.warned: dict[str, list[str]] = defaultdict(list)  # paths by reason
        self.trials: dict[int, str] = {}  # of a leaf of a user's class, by id
        self.functions: dict[str, str] = {}  # by name of a script's, a path of a user
        self.done: set[int] = set()
        self.has_plans = False  # whether a part of a model of transformers is split in place
        self.replaced: dict[nn.Module, nn.Module] = {}

    def run(self) -> None:
        if group.size() > 1:
            self._find_changed()
        self._visit(self.model, "", None)
        self._warn()
        if self.has_plans:
            importlib.import_module(f"{FAMILIES}.generation").wait_for_peers(self.model)
        for path, module in self.model.named_modules():
            if isinstance(module, DistributedModule):
                module.__dict__[PATH] = path
                split_parameters.rename(module, path)
                _refuse_other_cuts(module, path)
                if not module.IS_CONTAINER:
                    keep_together(module)
        self.model = self.compiled.put_back(self.model, self.replaced)

    def _visit(
        self,
        module: nn.Module,
        path: str,
        parent: nn.Module | None,
        in_family: bool = False,
        in_plan: bool = False,
    ) -> None:
        if id(module) in self.done:
            return
        self.done.add(id(module))
        if isinstance(module, DistributedModule):
            return  # made so by the user: its parts are split already
        cls = type(module)
        is_marked = marking.configuration(module) is not None
        if is_marked and (replacement.registration_of(module) or _wanted_form(module)):
            self._replace(module, path)
            return
        if is_marked and group.size() > 1:
            plan = plan_of(cls)
            if plan is not None:
                # Its parts may have plans of their own, and marks.
                reason = self._changed(module, path) or self._shared_outside(module)
                if not self._left_whole(module, path, reason):
                    adapters.check(module, path)
                    _carry_out(plan, module, path)
                    split_parameters.guard(module, path)
                    _watch(module, path)
                    if name := changed.attention_function_of_script(module):
                        self.functions.setdefault(name, path)
                    self.has_plans = True
                    keep_together(module)
                    in_plan = True
            elif (
                leaf_class(module) is not None
                and not in_plan
                and self._split_leaf(module, path, parent, in_family)
            ):
                return
        in_family = in_family or family_of(cls) is not None
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            self._visit(child, below, module, in_family, in_plan)

    def _find_changed(self) -> None:
        """Find a script's changes on any rank.  Collective over all ranks."""
        modules = [
            one
            for one in self.paths
            if marking.configuration(one) is not None
            and not isinstance(one, DistributedModule)
            and (_is_planned(type(one)) or leaf_class(one) is not None)
        ]
        if not modules:
            return
        reasons = [_why_whole(one, self.parents[one]) for one in modules]
        own = bytes(map(bool, reasons))
        everyones = [own]
        if not group.is_traced():
            everyones = objects.gather_bytes("smp.DistributedModel", CommGroup.WORLD, own)
        if len(set(map(len, everyones))) > 1:
            everyones = [own]  # the models differ, as the first step says by name
        for module, reason, *flags in zip(modules, reasons, *everyones, strict=True):
            if any(flags):
                self.changed[module] = reason or "it is changed on another rank"

    def _changed(self, module: nn.Module, path: str) -> str:
        reason = self.changed.get(module, "")
        if reason:
            self.warned[reason].append(path)
        return reason

    def _left_whole(self, module: nn.Module, path: str, reason: str) -> bool:
        self.out.append(Outcome(path, type(module).__name__, reason))
        return bool(reason)

    def _replace(self, module: nn.Module, path: str) -> None:
        new: nn.Module | str = self._shared_outside(module)
        if not new:
            tensors = [*module.parameters(), *module.buffers()]
            delayed = any(map(delayed_init.is_delayed, tensors))
            with delayed_init.delay_param_initialization(enabled=delayed):
                new = _replaced(module, path)
        if isinstance(new, nn.Module):
            if module is self.model:
                self.model = new
            for holder in self.model.modules():
                for name, child in holder._modules.items():
                    if child is module:
                        holder._modules[name] = new
            self.replaced[module] = new
            new.__dict__[TENSOR_PARALLELISM] = module.__dict__.get(TENSOR_PARALLELISM)
            new = ""
        self._left_whole(module, path, new)

    def _split_leaf(
        self, module: nn.Module, path: str, parent: nn.Module | None, in_family: bool
    ) -> bool:
        """Returns whether the leaf is split."""
        if module._parameters.get("weight") is None:
            return not self._left_whole(
                module, path, "its weight is not a parameter of its own"
            )
        config = marking.configuration(module) or {}
        others = [one for one in self.owners[id(module.weight)] if one is not module]
        tied = self._is_tied_vocabulary(module, others)
        by_rows = tied or is_cut_by_rows(module)
        if in_family and not is_cut_by_rows(module):
            vocabulary = tied or isinstance(module, nn.Embedding)
            if not (vocabulary and config.get("distribute_embedding")):
                return False  # the family's plan decides on splits
        reason = ""
        if others and not tied:
            reason = "its parameter 'weight' is shared with a module outside of it"
        elif isinstance(parent, _USE_CHILDRENS_WEIGHTS):
            reason = f"{type(parent).__name__} uses its weight without calling it"
        elif _length_that_is_cut(module, by_rows) < group.size():
            reason = f"it is too small for tensor_parallel_degree={group.size()}"
        else:
            reason = self._changed(module, path) or self._not_proven(module, by_rows)
            for other in others:
                if reason:
                    break
                if why := self.changed.get(other) or self._not_proven(other, by_rows):
                    reason = f"it shares its weight with a {type(other).__name__}: {why}"
        if not self._left_whole(module, path, reason):
            module.__dict__[PATH] = path
            _split_as(module, by_rows)
            split_parameters.guard(module, path)
        return not reason

    def _not_proven(self, module: nn.Module, by_rows: bool) -> str:
        """The reason for a leaf to stay whole; "": it is PyTorch's, or has proved itself."""
        if isinstance(module, DistributedModule) or users_class(type(module)) in _leaves:
            return ""
        if id(module) not in self.trials:
            path = self.paths[module]
            split = functools.partial(_split_as, by_rows=by_rows)
            self.trials[id(module)] = why = leaf_trial.why_whole(module, path, split)
            if why:
                self.warned[why].append(path)
        return self.trials[id(module)]

    def _is_tied_vocabulary(self, module: nn.Module, others: list[nn.Module]) -> bool:
        """Whether an embedding and a linear, both marked, share their weight."""
        kinds = {leaf_class(one) for one in (module, *others)}
        marked = all(marking.configuration(one) is not None for one in others)
        return len(others) == 1 and kinds == {nn.Embedding, nn.Linear} and marked

    def _warn(self) -> None:
        for reason, paths in self.warned.items():
            where = f"'{paths[0]}'" if paths[0] else "the model"
            more = f" and {len(paths) - 1} more are" if len(paths) > 1 else " is"
            warnings.warn(f"smp: {where}{more} left whole: {reason}", stacklevel=6)
        for name, path in self.functions.items():
            warnings.warn(
                f"smp: '{path}' is split, and its attention function '{name}' of the script's "
                "own gets this rank's heads alone: where it has values by head, or reads "
                "numbers of heads from the config, leave the attentions whole, "
                "smp.set_tensor_parallelism(attention, False)",
                stacklevel=6,
            )

    def _shared_outside(self, module: nn.Module) -> str:
        """Why not to split a module alone: a parameter shared with others; or ""."""
        inside = set(module.modules())
        for name, parameter in module.named_parameters():
            if not set(self.owners[id(parameter)]) <= inside:
                return f"its parameter '{name}' is shared with a module outside of it"
        return ""


def _refuse_other_cuts(module: nn.Module, path: str) -> None:
    """Refuse a weight that a script has tied to one cut otherwise.

    Raises:
        ValueError: the text names the module and both axes.
    """
    for name, slices in module.__dict__.get(HELD, {}).items():
        weight = module._parameters.get(name)
        given = None if weight is None else slices_of(weight)
        if given not in (None, slices):
            raise ValueError(
                f"smp: '{path}' cuts its '{name}' along axis {slices.axis}, and has that of "
                f"another module, cut along axis {given.axis}: have both cut alike, a linear "
                "with by_outputs=True and an embedding with vocab_parallel=True, or neither"
            )


def leaf_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of PyTorch's behind a leaf; None: no leaf."""
    return next((base for base in type(module).__mro__ if base in _leaves), None)


def _split_as(module: nn.Module, by_rows: bool) -> None:
    kind = leaf_class(module)
    assert kind is not None
    _leaves[kind](module, by_rows)


def _carry_out(plan: Plan, module: nn.Module, path: str) -> None:
    """Split a module by its plan.

    Raises:
        ValueError: the module has fewer heads or channels than there are tp_ranks.
    """
    try:
        plan(module, path)
    except TooShort as short:
        where = f"'{path}' of class {type(module).__name__}" if path else type(module).__name__
        raise ValueError(
            f"smp: {where} cannot be split: {str(short).removeprefix('smp: ')}: leave it "
            "whole, smp.set_tensor_parallelism(module, False)"
        ) from None


def _replaced(module: nn.Module, path: str) -> nn.Module | str:
    """The replacement of a module; or the reason for none.  Collective over the TP_GROUP."""
    form = None if replacement.registration_of(module) else _wanted_form(module)
    if form:
        return form.replace(module, path)
    blocks = _named_in_family(type(module), "BLOCKS")
    return replacement.replace(module, path, blocks.get(type(module).__name__))


def is_cut_by_rows(module: nn.Module) -> bool:
    """Whether the user has a leaf's weight cut by rows, tied or not."""
    config = marking.configuration(module) or {}
    asked = "vocab_parallel" if isinstance(module, nn.Embedding) else "by_outputs"
    return bool(config.get(asked)) or module.__dict__.get(BY_ROWS, False)


def _length_that_is_cut(module: Any, by_rows: bool) -> int:
    """The length to cut: a linear's inputs, an embedding's dimension; by rows, the rows."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings if by_rows else module.embedding_dim
    return module.out_features if by_rows else module.in_features


def family_of(cls: type[nn.Module]) -> str | None:
    """The module with the plans for a class of transformers, or for a subclass."""
    for base in cls.__mro__:
        if base.__module__.startswith("transformers.models."):
            folder = base.__module__.split(".")[2]  # gpt_neo, for example
            name = f"{FAMILIES}.{folder.replace('_', '')}"
            if importlib.util.find_spec(name) is not None:
                return name
    return None


def _named_in_family(cls: type[nn.Module], kind: str) -> dict[str, Any]:
    family = family_of(cls)
    return {} if family is None else getattr(importlib.import_module(family), kind, {})


def plan_of(cls: type[nn.Module]) -> Plan | None:
    """The plan for a class, or for its base class."""
    plans = _named_in_family(cls, "IN_PLACE")
    return next((plans[b.__name__] for b in cls.__mro__ if b.__name__ in plans), None)


def _is_planned(cls: type[nn.Module]) -> bool:
    return plan_of(cls) is not None


def _why_whole(module: nn.Module, parents: Iterable[nn.Module]) -> str:
    """This rank's reason to leave a module with a plan, or a leaf, whole; ""."""
    cls = type(module)
    if reason := next(filter(None, map(adapters.why_whole, parents)), ""):
        return reason
    if _is_planned(cls):
        return changed.why_whole(module, _named_in_family(cls, "IN_PLACE"), _is_planned)
    method = changed.method_of_instance(module)
    return f"it has another {method} than its class" if method else ""


def _watch(module: nn.Module, path: str) -> None:
    """Have the region in a split module look at the modules inside."""
    inside = dict(changed.inside(module, _is_planned))
    places = {}
    for inner, one in inside.items():
        parent, _, name = inner.rpartition(".")
        if inner:
            place = inside_regions.Place(inside[parent], name, one)
            places[f"{path}.{inner}".lstrip(".")] = place
    for one in inside.values():
        if REGION in one.__dict__:
            inside_regions.watch(one, path, places)


def _wanted_form(module: nn.Module) -> Any:
    """The ``smp.compat.forms.Form`` for a module's place, if there is one.

    Only a class of transformers itself has one: a subclass may act otherwise.
    """
    wanted = (marking.configuration(module) or {}).get("replace")
    cls = users_class(type(module))
    if not (_are_old_transformers() if wanted is None else wanted):
        return None
    if not cls.__module__.startswith("transformers.models."):
        return None
    return _named_in_family(cls, "FORMS").get(cls.__name__)


def _are_old_transformers() -> bool:
    """Whether scripts of today's transformers know the names of distributed modules."""
    version = getattr(sys.modules.get("transformers"), "__version__", "99.0")
    return tuple(map(int, version.split(".")[:2])) < (4, 27)
