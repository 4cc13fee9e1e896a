"""Whether a module is unchanged from the class of its plan.

A plan splits linears by their outputs and inputs, and takes the code between them to act on
each channel by itself.  A subclass, a replaced method, a module in place of another or a hook
may act otherwise on this rank's channels.
"""

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from smp.marks import REGION
from smp.modules.stand_ins import users_class
from smp.tensor_parallel.rows import adapters, inside_regions

_IsPlanned = Callable[[type[nn.Module]], bool]


def method_of_instance(module: nn.Module) -> str:
    """A method of its class replaced on the module itself; "": none."""
    cls = users_class(type(module))
    own = (name for name in vars(module) if callable(getattr(cls, name, None)))
    return next(own, "")


def why_whole(module: nn.Module, plans: Collection[str], is_planned: _IsPlanned) -> str:
    """The reason for a module's plan not to hold; "": it holds.

    Args:
        module: of a class with a plan, or of a subclass.
        plans: names of the classes with plans in its family.
        is_planned: whether a class has a plan of its own.
    """
    if reason := _of_class(type(module), plans):
        return reason
    adapted: set[nn.Module] = set()  # modules in adapters: these have checks of their own
    for path, inner in inside(module, is_planned):
        its = f"its '{path}'" if path else "it"
        if method := method_of_instance(inner):
            return f"{its} has another {method} than its class"
        if path and (hook := inside_regions.kind_of(inner)):
            return f"{its} has a {hook}, which would see this rank's channels alone"
        if inside_regions.is_parametrized(inner):
            return f"{its} has a parametrization"
        if inner in adapted:
            continue
        if path and (reason := _of_inner(path, inner)):
            return f"{its} {reason}"
        for name, value in vars(inner).items():
            if _is_activation(name) and callable(value) and not _acts_by_element(value):
                return f"its '{f'{path}.{name}'.lstrip('.')}' {_MIXES}"
        if adapters.adapted(inner) is not None:
            adapted.update(inner.modules())
    return ""


def attention_function_of_script(module: nn.Module) -> str:
    """The name of a split attention's function, if a script has registered it; ""."""
    regions = (one for one in module.modules() if REGION in one.__dict__)
    masked = next((one for one in regions if one.__dict__[REGION][0].masks), None)
    name = getattr(getattr(masked, "config", None), "_attn_implementation", None)
    modeling = sys.modules.get("transformers.modeling_utils")
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", {})
    if name is None or name not in functions:
        return ""
    library = str(getattr(functions[name], "__module__", "")).partition(".")[0]
    return "" if library in ("transformers", "kernels") else name


def _of_class(cls: type[nn.Module], plans: Collection[str]) -> str:
    """A method of the user's subclass in place of the planned class's."""
    for one in users_class(cls).__mro__:
        if one.__module__.startswith("transformers."):
            return ""
        methods = (name for name, value in vars(one).items() if callable(value))
        own = {name for name in methods if name == "__call__" or not name.startswith("__")}
        base = next(b for b in one.__mro__ if b.__name__ in plans and b is not one)
        if instead := sorted(name for name in own - {"extra_repr"} if hasattr(base, name)):
            return (
                f"its class {one.__name__} has a {instead[0]} of its own, and the plan for "
                f"tensor parallelism is {base.__name__}'s"
            )
    return ""


def inside(module: nn.Module, is_planned: _IsPlanned) -> Iterator[tuple[str, nn.Module]]:
    """A module and those in it, by path, but for those with plans of their own."""
    found = [("", module)]
    for path, one in found:
        yield path, one
        for name, child in one.named_children():
            if not is_planned(type(child)):
                found.append((f"{path}.{name}".lstrip("."), child))


# --------------------------------------------------------------------------------- modules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_MIXES = "does not act on each channel of each sample by itself"


def _of_inner(path: str, module: nn.Module) -> str:
    """The difference from a plan, of a module at a path in the planned one; ""."""
    cls = users_class(type(module))
    name = path.rpartition(".")[2].lower()
    if _is_activation(name):
        return "" if _acts_by_element(module) else _MIXES
    if cls is nn.Linear or cls.__name__ == "Conv1D":
        has_weight = module._parameters.get("weight") is not None
        return "" if has_weight else "has a weight that is not a parameter of its own"
    is_known = (
        cls in (nn.Embedding, *_CONTAINERS)
        or (cls in (nn.Dropout, nn.Identity) and "drop" in name)
        or "norm" in name
        or adapters.adapted(module) is not None
        or cls.__module__.startswith("transformers.")
    )
    return "" if is_known and not issubclass(cls, nn.Linear) else f"is a {cls.__name__}"


def _is_activation(name: str) -> bool:
    words = name.split("_")
    return words[0].startswith("act") and "dropout" not in words or "act" in words[1:]


def _acts_by_element(function: Any) -> bool:
    """Whether its value for a part of a tensor is that part of its value for the whole."""
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return False
    x = 2.0 * torch.arange(4.0 * 6 * 8, device="cpu").cos().view(4, 6, 8)
    try:
        function = copy.deepcopy(function)  # a function with statistics changes in a call
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            whole = function(x.clone())
            return whole.shape == x.shape and all(
                torch.allclose(function(part.clone()), kept, atol=1e-5)
                for axis in range(3)
                for part, kept in zip(x.chunk(2, axis), whole.chunk(2, axis), strict=True)
            )
    except Exception:  # any exception of a user's code
        return False
