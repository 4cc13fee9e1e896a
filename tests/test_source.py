"""Rules of the source that no compiler or formatter checks."""

import ast
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from smp import _core

HERE = Path(__file__).resolve()  # holds every pattern, and is left out
ROOT = HERE.parent.parent
OURS = ["csrc", "smp", "smdistributed", "tests", "benchmarks", "examples", "docs", ".ci"]

# Folders of csrc from bottom to top, and whose headers the files of each may include beside
# their own folder's; a folder inside another one counts by itself.
MAY_INCLUDE: dict[str, set[str]] = {
    "common": set(),
    "partition": {"common"},
    "device": {"common"},
    "tp_kernels": {"common", "device"},
    "comm/memory": {"common", "device"},
    "comm/device": {"common", "device", "comm/memory"},
    "comm/transport": {"common", "comm/memory"},
    "comm/transport/connecting": {"common"},
    "comm/transport/shm": {"common", "comm/memory", "comm/transport"},
    "comm/transport/tcp": {"common", "comm/transport", "comm/transport/connecting"},
    "comm/transport/ucx": {"common", "comm/transport", "comm/transport/connecting"},
    "comm/transport/mpi": {"common", "comm/transport", "comm/transport/connecting"},
    "comm/messaging": {"common", "comm/memory", "comm/device", "comm/transport"},
    "comm/collective/kernels": {"common"},
    "comm/collective/checks": {
        "common",
        "comm/messaging",
        "comm/memory",
        "comm/device",
        "comm/collective/kernels",
    },
    "comm/collective/intra_host": {
        "common",
        "comm/messaging",
        "comm/memory",
        "comm/device",
        "comm/collective/kernels",
        "comm/collective/checks",
    },
    "comm/collective/inter_host": {
        "common",
        "comm/messaging",
        "comm/memory",
        "comm/collective/checks",
        "comm/collective/intra_host",
    },
    "comm/collective": {
        "common",
        "comm/messaging",
        "comm/device",
        "comm/collective/kernels",
        "comm/collective/checks",
        "comm/collective/intra_host",
        "comm/collective/inter_host",
    },
    "server": {"common", "comm/messaging"},
    "python/process": {
        "common",
        "comm/messaging",
        "comm/transport",
        "comm/transport/connecting",
        "comm/transport/ucx",
    },
    "python/values": {
        "common",
        "comm/messaging",
        "comm/device",
        "comm/collective/kernels",
        "server",
    },
    "python/modules": {
        "common",
        "comm/messaging",
        "comm/device",
        "server",
        "python/process",
        "python/values",
    },
    "python/collectives": {
        "common",
        "comm/messaging",
        "comm/collective",
        "comm/collective/kernels",
        "comm/collective/checks",
        "python/process",
        "python/values",
    },
    "python": {
        "common",
        "comm/transport/mpi",
        "partition",
        "tp_kernels",
        "python/process",
        "python/values",
        "python/modules",
        "python/collectives",
    },
}


# The rooms of smp, folders and single files, from bottom to top.  A file imports its own room's
# files and those of rooms before it, for typing and within functions, too.  `smp/__init__.py`
# and the command line stand above all.
ROOMS = (
    "_version", "torch_versions", "not_built", "marks", "pytorch", "job", "runtime_state",
    "state_mod", "optimizer_trial", "ranks", "collectives", "slicing", "sharding", "optimizers",
    "modules", "partitioning", "precision", "runtime", "tensor_parallel", "checkpointing",
    "compat", "data_parallel", "saving", "memory", "amp", "distributed_optimizer", "model",
    "execution", "nn", "start", "timeline",
)  # fmt: skip
ABOVE_ALL = {"__init__", "__main__", "self_test"}
# Likewise the folders in one.
WITHIN = {"tensor_parallel": ("backward", "rows", "splits")}


def files(*suffixes: str, under: list[str] = OURS) -> Iterator[tuple[Path, str]]:
    """Our files with one of these suffixes, and their text; what is built is left out."""
    for folder in under:
        for path in sorted((ROOT / folder).rglob("*")):
            ours = path.is_file() and "build" not in path.parts and path != HERE
            if ours and path.suffix in suffixes:
                yield path.relative_to(ROOT), path.read_text()


def includes(text: str) -> set[str]:
    """The headers of csrc that a file includes."""
    return set(re.findall(r'# *include "([\w/]+\.h)"', text))


def test_every_folder_of_the_core_has_its_place():
    folders = {path.parent for path, _ in files(".c", ".h", ".cu", under=["csrc"])}
    assert {str(folder.relative_to("csrc")) for folder in folders} == set(MAY_INCLUDE)


def test_folders_of_the_core_are_layers():
    below: set[str] = set()
    for folder, may in MAY_INCLUDE.items():
        assert may <= below, folder
        below.add(folder)


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_a_folder_includes_only_folders_below_it(folder):
    for path, text in files(".c", ".h", ".cu", under=[f"csrc/{folder}"]):
        if path.parent == Path("csrc", folder):
            used = {str(Path(header).parent) for header in includes(text)}
            assert used <= MAY_INCLUDE[folder] | {folder}, path


def test_no_file_includes_itself_by_way_of_others():
    """X.c and X.h count as one; imports within functions, and for types, count."""
    needs: dict[str, set[str]] = defaultdict(set)
    for path, text in files(".c", ".h", under=["csrc"]):
        unit = str(path.with_suffix(""))
        needs[unit] |= {f"csrc/{header.removesuffix('.h')}" for header in includes(text)}
        needs[unit].discard(unit)
    modules = dict(files(".py", under=["smp"]))
    for path, text in modules.items():
        if path.parts[1] not in ("__init__.py", "__main__.py"):
            named = {Path("smp", *name.split(".")) for name in imported(text)}
            needs[str(path)] = {
                str(p.with_suffix(".py")) for p in (*named, *(n.parent for n in named))
            } & set(map(str, modules))
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" includes ".join(reversed(error.args[1])))


def imported(text: str, package: str = "smp") -> Iterator[str]:
    """Dotted names of a package's modules, and of their members, imported by a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        inside = f"{package}."
        yield from (n[len(inside) :] for n in names if n.startswith(inside))


def rooms_imported(text: str, package: str = "smp") -> set[str]:
    return {name.split(".")[0] for name in imported(text, package)}


def test_rooms_of_smp_are_layers():
    for path, text in files(".py", under=["smp"]):
        room = path.parts[1].removesuffix(".py")
        if room not in ABOVE_ALL:
            may = {*ROOMS[: ROOMS.index(room) + 1], "_core", "_mpi"}
            assert rooms_imported(text) <= may, path


@pytest.mark.parametrize("room", WITHIN)
def test_so_are_folders_within_a_room(room):
    for level, folder in enumerate(WITHIN[room]):
        above = WITHIN[room][level + 1 :]
        for path, text in files(".py", under=[f"smp/{room}/{folder}"]):
            assert rooms_imported(text, f"smp.{room}").isdisjoint(above), path


def test_python_h_is_included_in_one_folder_only():
    for path, text in files(".c", ".h", under=["csrc", "tests/core", "tests/fuzz"]):
        if path.parts[:2] != ("csrc", "python"):
            assert "Python.h" not in text, path


def test_a_source_file_includes_its_own_header_first():
    for path, text in files(".c", under=["csrc"]):
        if (ROOT / path.with_suffix(".h")).exists():
            first = re.search(r'#include "([^"]+)"', text)
            want = str(path.with_suffix(".h").relative_to("csrc"))
            assert first and first.group(1) == want, path


def test_an_include_guard_is_named_for_its_file():
    for path, text in files(".h", under=["csrc"]):
        name = f"SMP_{'_'.join(path.with_suffix('').parts[1:]).upper()}_H"
        assert f"#ifndef {name}\n#define {name}\n" in text, path


SLEEPS = r"\b(?:time\.sleep|sleep|usleep|nanosleep|clock_nanosleep)\s*\((?!0\))"


# Random delays of what others run beside; nothing depends on their length.
MAY_REST = {Path("tests/core/server_test.c"), Path("tests/core/stand_in.c")}


def test_no_test_sleeps():
    """A test waits for an event with a deadline, or drives the thread step by step."""
    for path, text in files(".py", ".c", ".h", under=["tests"]):
        assert path in MAY_REST or not re.search(SLEEPS, text), path


def test_no_file_is_a_drawer():
    """utils, helpers, common and misc are not names of modules."""
    for path, _ in files(".py", ".c", ".h"):
        assert not re.search(r"utils?$|helpers?$|common$|misc$", path.stem), path


MACHINE_PATHS = re.compile(
    r"/(?:home|Users|root|work|farm)/\w"
    r"|/tmp/\w+/\w"
    r"|\b(?:pypi|pythonhosted|npmjs|debian)\.(?:org|net)"
)


def test_no_path_of_a_machine_and_no_registry_is_named():
    for path, text in files(".py", ".pyi", ".c", ".h", ".md", ".toml", ".sh", ""):
        assert not (found := MACHINE_PATHS.search(text)), (path, found)


# A change of PyTorch for the whole process, or a hook on all modules.
PATCHES = re.compile(
    r"\b(?:nn\.Module|Tensor|Function|GradScaler)\.\w+ = "
    r"|\b(?:set|del)attr\((?:nn|torch|Tensor)\b"
    r"|\bregister_module_\w*hook|\bcell_contents = |\b_foreach_supported_types\."
)


def test_torch_is_changed_in_one_file():
    found = [path for path, text in files(".py", under=["smp"]) if PATCHES.search(text)]
    assert found == [Path("smp/pytorch/patches.py")]


# A name on a user's object, or an assignment to its class.
MARKS = re.compile(r"\"_smp_\w+\"|\b__class__ = |\"__class__\", \w")


def test_names_on_users_objects_are_in_one_file():
    """... but for the attributes of smp's own model."""
    found = [path for path, text in files(".py", under=["smp"]) if MARKS.search(text)]
    assert found == [Path("smp/marks.py"), Path("smp/model.py")]


def test_nothing_is_left_for_later_without_an_owner():
    for path, text in files(".py", ".c", ".h"):
        assert not re.search(r"\b(?:TODO|FIXME|XXX)\b", text), path


def test_every_module_says_what_it_is():
    for path, text in files(".py", under=["smp", "smdistributed", "tests", "benchmarks"]):
        if text.strip():
            assert text.startswith(('"""', 'r"""', "#!")), path


@pytest.mark.parametrize(
    "check, text",
    [
        (SLEEPS, "time.sleep(1)"),
        (SLEEPS, "    usleep(100);"),
        (MACHINE_PATHS, "see /home/someone/project"),
        (MACHINE_PATHS, "/tmp/wt/ranks"),
        (MACHINE_PATHS, "from pypi" + ".org"),
        (MARKS, 'self.__dict__["_smp_pin"] = 1'),
        (MARKS, "module.__class__ = kind"),
        (MARKS, 'object.__setattr__(module, "__class__", kind)'),
        (PATCHES, "    nn.Module._apply = _apply"),
        (PATCHES, "setattr(nn.Module, name, given)"),
    ],
)
def test_the_patterns_find_what_they_are_for(check, text):
    assert re.search(check, text)


def python_modules(under: Path) -> dict[str, Path]:
    """The modules below a package, by name; its own ``__init__``, which shows users what
    they may call, is none of them."""
    modules = {}
    for path in under.rglob("*.py"):
        parts = path.relative_to(under.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules.pop(under.name, None)
    return modules


class Imports(ast.NodeVisitor):
    """What a module imports, inside of functions, too; for typing alone does not count."""

    def __init__(self, known: Iterable[str]):
        self.known = set(known)
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for inner in node.orelse:
                self.visit(inner)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {name.name for name in node.names} & self.known

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports name the whole path"
        for name in node.names:
            whole = f"{node.module}.{name.name}"
            self.found |= {whole if whole in self.known else str(node.module)} & self.known


def circles(modules: dict[str, Path]) -> list[list[str]]:
    """Sets of modules that import one another in a circle."""
    above: dict[str, set[str]] = {}
    for name, path in modules.items():
        imports = Imports(modules.keys() - {name})
        imports.visit(ast.parse(path.read_text()))
        above[name] = imports.found

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(above[start])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += above[name]
        return seen

    behind = {name: reached(name) for name in modules}
    found = {
        tuple(sorted(other for other in behind[name] if name in behind[other]))
        for name in modules
        if name in behind[name]
    }
    return sorted(map(list, found))


def test_no_modules_import_one_another_in_a_circle():
    assert circles(python_modules(ROOT / "smp")) == []


def test_a_circle_is_found_wherever_it_imports(tmp_path):
    package = tmp_path / "smp"
    (package / "a").mkdir(parents=True)
    text = {
        "a/__init__.py": "",
        "a/one.py": "from smp.a import two",
        "a/two.py": "def late():\n    import smp.three\n",
        "three.py": "from smp.a.one import name",
        "four.py": "from smp import three\nif TYPE_CHECKING:\n    from smp import five",
        "five.py": "from smp.four import name",
    }
    for name, lines in text.items():
        (package / name).write_text(lines)

    assert circles(python_modules(package)) == [["smp.a.one", "smp.a.two", "smp.three"]]


def test_no_two_modules_differ_by_an_s():
    names = {path.stem for path in (ROOT / "smp").rglob("*.py")}
    names |= {path.name for path in (ROOT / "smp").rglob("*") if path.is_dir()}
    assert {name for name in names if f"{name}s" in names} == set()


# ------------------------------------------------------------------------ make headers


def make_headers(*argv: str, **env: str) -> subprocess.CompletedProcess:
    command = [shutil.which("make"), "-n" if env else "-s", "headers", *argv]
    said = {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, **said)


def test_no_headers_of_python_are_a_failure():
    done = make_headers("HEADERS=")
    assert done.returncode != 0 and "no headers of Python 3.10 to 3.14" in done.stderr


def test_headers_are_looked_for_on_path_and_with_pyenv(tmp_path):
    """... where the last one that is looked for is not there."""
    folders = [tmp_path / "python3.10", tmp_path / "versions/3.12.1/include/python3.12"]
    programs = {"python3.10": folders[0], "pyenv": tmp_path}
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "Python.h").touch()
    for name, says in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho {says}\n")
        program.chmod(0o755)
    done = make_headers(PATH=str(tmp_path / "bin"))
    assert done.returncode == 0, done.stderr
    found = re.search("folders='(.*)'", done.stdout)[1].split()
    assert found == [str(folder) for folder in folders]


def test_the_manual_of_the_core_has_its_names():
    """Functions, constants and classes, and of these the methods."""
    manual = ast.parse((ROOT / "smp/_core.pyi").read_text()).body
    there = [one.target.id for one in manual if isinstance(one, ast.AnnAssign)]
    defined = [one for one in manual if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    there += [one.name for one in defined]
    assert sorted(public(there)) == sorted(public(vars(_core)))
    for one in defined:
        if isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
            methods = [each.name for each in one.body if isinstance(each, ast.FunctionDef)]
            fields = [each.target.id for each in one.body if isinstance(each, ast.AnnAssign)]
            its = public(vars(getattr(_core, one.name)))
            assert sorted(public([*methods, *fields])) == sorted(its)


def public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]
