"""Low-rank adapters around linears of a region, split with them.

An adapted linear is a module with the linear as ``base_layer``, and small ones as ``lora_A``
(to the low rank) and ``lora_B`` (from it).  Each is a module or a dict of some, by the names of
LoRA's own code and of peft.  The module adds ``lora_B(lora_A(x))`` to the linear's output.

Some of peft's wrappers need all of the module inside on each rank: `why_whole`.
"""

from typing import Any, NamedTuple

from torch import nn


class Adapted(NamedTuple):
    """The linears of an adapted one."""

    base: Any
    downs: list[Any]  # to the low rank
    ups: list[Any]  # from it


def adapted(module: nn.Module) -> Adapted | None:
    """The parts of a module, if it is an adapted linear."""
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module) or _parameter_of(module):
        return None
    return Adapted(base, _linears(module, "lora_A"), _linears(module, "lora_B"))


def why_whole(parent: nn.Module) -> str:
    """The reason for a wrapper's module to stay whole; "": none, or no wrapper.

    Args:
        parent: of the module; as peft's of ``target_parameters`` and of adaption prompts.
    """
    its = f"its parent, a {type(parent).__name__},"
    if name := _parameter_of(parent):
        return f"{its} parametrizes its '{name}' in each call"
    if "adaption_prompt" in parent._parameters:
        return f"{its} calls its linears by itself"
    return ""


def _parameter_of(module: nn.Module) -> str:
    """The name of the one parameter that a wrapper adapts; "": none."""
    is_wrapper = isinstance(getattr(module, "base_layer", None), nn.Module)
    name = getattr(module, "parameter_name", "") if is_wrapper else ""
    return name if isinstance(name, str) else ""


def _linears(module: nn.Module, name: str) -> list[Any]:
    child = module._modules.get(name)
    if isinstance(child, nn.ModuleDict):
        return list(child.values())
    return [] if child is None else [child]


def check(region: nn.Module, path: str) -> None:
    """Make sure that the adapters in a module to split can be split with it.

    Raises:
        NotImplementedError: an adapter has other parameters; the text names it.
    """
    for name, module in region.named_modules(prefix=path):
        parts = adapted(module)
        if parts is None:
            continue
        known = {id(p) for p in parts.base.parameters()}
        known |= {id(p) for up in parts.ups for p in up.parameters()}
        known |= {id(down.weight) for down in parts.downs if type(down) is nn.Linear}
        others = [n for n, p in module.named_parameters() if id(p) not in known]
        if others or not all(type(up) is nn.Linear for up in parts.ups):
            raise NotImplementedError(
                f"smp: '{name}' ({type(module).__name__}) wraps a linear of '{path}', which is "
                "split; of adapters only nn.Linears lora_A (without a bias) and lora_B can be "
                f"split with it, and it has {', '.join(others) or 'others'}: leave the module "
                f"whole, smp.set_tensor_parallelism(module, False)"
            )
