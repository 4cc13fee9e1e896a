"""Every public name has a docstring, and is in the reference (docs/reference, `make docs`)."""

import enum
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import smp

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"


def in_the_reference() -> set[str]:
    """Full names of what its pages describe."""
    names = set()
    for page in REFERENCE.glob("*.rst"):
        module = ""
        for kind, name in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.M):
            if kind == "currentmodule":
                module = name
            elif kind.startswith("auto") or kind == "data":
                names.add(f"{module}.{name}")
    return names


def public_names() -> dict[str, object]:
    """What a script may use, by full name."""
    modules = {
        "smp": [name for name in vars(smp) if not name.startswith("_")],
        "smp.nn": smp.nn.__all__,
        "smp.nn.transformer.options": ["Options"],
        "smp.nn.utils": [name for name in vars(smp.nn.utils) if not name.startswith("_")],
        "smp.optimizers": ["FusedAdam", "FusedLAMB", "FusedNovoGrad"],
        "smp.amp": ["GradScaler"],
        "smp.compat.script_names": ["rmsg", "get_distribution_axis"],
    }
    found = {
        f"{module}.{name}": getattr(import_module(module), name)
        for module, names in modules.items()
        for name in names
    }
    return {name: one for name, one in found.items() if not isinstance(one, ModuleType)}


def test_every_public_name_is_in_the_reference():
    assert in_the_reference() == set(public_names())


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_has_a_docstring(name):
    """And so have the methods that its class adds to torch's."""
    one = public_names()[name]
    if isinstance(one, enum.Enum) or name in ("smp.state", "smp.core"):
        one = type(one)
    assert one.__doc__
    methods = vars(one) if inspect.isclass(one) else {}
    for method in (m for m in methods if not m.startswith("_")):
        assert not inspect.isfunction(methods[method]) or inspect.getdoc(getattr(one, method))


OPTIONS = "smp.nn.transformer.options.Options"  # what many classes take some of
OF_SCRIPTS = ("smp.state", "smp.core")  # instances: scripts call methods of these


def docstrings() -> dict[str, tuple[object, str]]:
    """Each public callable and what its own docstring says, by full name."""
    found: dict[str, tuple[object, str]] = {}
    for name, one in public_names().items():
        if name in OF_SCRIPTS or isinstance(one, enum.Enum):
            one = type(one)
        elif callable(one) and not has_other_arguments(one):
            found[name] = one, one.__doc__ or ""
        for method, value in vars(one).items() if inspect.isclass(one) else ():
            plain = getattr(value, "__func__", value)
            if not method.startswith("_") and inspect.isfunction(plain):
                found[f"{name}.{method}"] = getattr(one, method), plain.__doc__ or ""
    return found


def has_other_arguments(one: object) -> bool:
    """Whether scripts make no instances of it, but for messages."""
    return inspect.isclass(one) and issubclass(one, BaseException | enum.Enum)


def names(parameter: str, doc: str) -> bool:
    """Whether it is an entry of a list such as that of ``Args``, or stands in quotes."""
    entry = rf"^ +(?:\w+, )*{parameter}(?:, \w+)*:"
    return bool(re.search(rf"{entry}|`[^`\n]*\b{parameter}\b[^`\n]*`", doc, re.M))


@pytest.mark.parametrize("name", docstrings())
def test_a_docstring_names_every_parameter(name):
    """Those of the transformers are in one table, to which their classes refer."""
    one, doc = docstrings()[name]
    if f":class:`{OPTIONS}`" in doc:
        doc += public_names()[OPTIONS].__doc__
    own = [p for p in inspect.signature(one).parameters if p not in ("self", "args", "kwargs")]

    assert doc and not [parameter for parameter in own if not names(parameter, doc)]


def test_every_page_is_in_the_table_of_contents():
    pages = {page.stem for page in REFERENCE.glob("*.rst")} - {"index"}
    listed = re.findall(r"^   (\w+)$", (REFERENCE / "index.rst").read_text(), re.M)
    assert set(listed) == pages
