"""Imports the modules of ``smp`` under the names that existing scripts use.

A name below ``smdistributed.modelparallel.torch`` is the module of that name below
``smp``, not a second copy of it: class identity holds however a script imports.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

ROOT = "smdistributed.modelparallel"
TORCH = f"{ROOT}.torch"
EMPTY = ""  # a package that only holds others

# What does not have the same name in smp.
MODULES = {
    TORCH: "smp",
    f"{TORCH}.exceptions": "smdistributed.modelparallel.exceptions",
    f"{TORCH}.patches": EMPTY,
    f"{TORCH}.patches.checkpoint": "smp.compat.checkpoint_calls",
    f"{TORCH}.utils": "smp.compat.script_names",
    f"{TORCH}.nn.utils": "smp.nn.building_blocks",
    f"{ROOT}.backend": EMPTY,
    f"{ROOT}.backend.exceptions": "smdistributed.modelparallel.exceptions",
    f"{ROOT}.test": EMPTY,
    f"{ROOT}.test.torch": EMPTY,
    f"{ROOT}.test.torch.utils": "smp.compat.script_names",
}


def real_name(name: str) -> str | None:
    """The module behind a name; None for a name that is none of ours."""
    if name in MODULES:
        return MODULES[name]
    return f"smp.{name.removeprefix(TORCH + '.')}" if name.startswith(TORCH + ".") else None


class _SameModule(Loader):
    """Loads a module of smp as it is, leaving its own spec in place."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
        if self.real == "smp":
            alias_loaded_modules()


class _EmptyPackage(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        real = real_name(fullname)
        if real == EMPTY:
            return ModuleSpec(fullname, _EmptyPackage(), is_package=True)
        if real is None or (found := find_spec(real)) is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _SameModule(real), is_package=is_package)


def alias_loaded_modules() -> None:
    """Name what smp has imported already.

    An import of those would bind the module to its name in smp, where a function of the
    same name may be meant.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("smp."):
            sys.modules.setdefault(f"{TORCH}.{name.removeprefix('smp.')}", module)


def install() -> None:
    """Before the ordinary finders, which would load a second copy from smp's folder."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
