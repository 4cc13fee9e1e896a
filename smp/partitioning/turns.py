"""The gates of a model's microbatches, by its trace.

One process runs a microbatch to its end before the next begins.  A module may change a tensor
or attribute read by another call of it, or by another module.  Then the next microbatch's first
use waits for the last one's end: both stand behind one gate (``csrc/server/turns.h``).
"""

import warnings
from collections.abc import Callable

from torch import Tensor, nn

from smp.modules.gates import Turns
from smp.partitioning.tracing import ModuleTrace, Trace


def turns_of(root: nn.Module, trace: Trace | None) -> Turns:
    """The gates of a model, and the attributes of each microbatch's own.

    Args:
        trace: None: unknown; then each module with buffers has a gate of its own.
    """
    made = _Making(root, trace)
    return made.turns()


class _Making:
    """Modules that share a changing tensor or attribute, and their gates."""

    def __init__(self, root: nn.Module, trace: Trace | None):
        self.root = root
        self.trace = trace
        self.named = dict(root.named_modules())
        self.member_of: dict[str, str] = {}  # a module's path -> another one's of its gate
        self.unknown: set[str] = set()  # paths whose number of calls tells nothing
        self.reads: dict[str, tuple[str, ...]] = {}

    def turns(self) -> Turns:
        if self.trace is None:
            paths = [path for path, module in self.named.items() if module._buffers]
            modules = {path: number for number, path in enumerate(paths)}
            return Turns([0] * len(paths), modules, {}, {}, {}, {})
        seen = self.trace.modules
        self._join_users(seen)
        for path, module in self.named.items():
            if self._changes_alone(module, seen[path]):
                self._join(path, path)
            if seen[path].hooks_keep:
                self._join(path, path)
                self.unknown.add(path)
                warnings.warn(
                    f"smp: a hook of module '{path}' ({type(module).__name__}) keeps tensors "
                    "where microbatches share them: each calls the module when the forward of "
                    "the one before it is over, and the pipeline waits; return the tensors "
                    "from the forward instead",
                    stacklevel=2,
                )
            names = set(seen[path].outside_reads) - seen[path].carried_attributes.keys()
            if names and path in self.member_of:
                self.unknown.add(path)
                self.reads[path] = tuple(sorted(names))
        return self._numbered(seen)

    def _changes_alone(self, module: nn.Module, seen: ModuleTrace) -> bool:
        """Whether its calls must be in order, with or without other users.

        A traced evaluation may leave buffers of training as they are, so BatchNorm and the like
        count in any case.  So do modules with buffers that did not run.
        """
        if seen.grows or seen.swapping or seen.changed_buffers:
            return True
        tracked = hasattr(module, "track_running_stats") or not seen.executions
        return bool(module._buffers) and tracked

    def _join_users(self, seen: dict[str, ModuleTrace]) -> None:
        """One gate for all users of a changing buffer or parameter.

        A module that reads it from its owner waits there, where this is seen.
        """
        buffers = dict(self.root.named_buffers(remove_duplicate=False))
        parameters = dict(self.root.named_parameters(remove_duplicate=False))
        changing = {id(parameters[n]) for one in seen.values() for n in one.changed_parameters}
        first: dict[int, str] = {}

        def use(tensor: Tensor, path: str) -> None:
            self._join(path, first.setdefault(id(tensor), path))

        for path, one in seen.items():
            for name in one.changed_buffers:
                use(self.named[path]._buffers[name], path)
            for name in (*one.changed_parameters, *one.parameters):
                if id(parameters[name]) in changing:
                    use(parameters[name], path)
        for path, one in seen.items():
            for name in one.buffers:
                if not self._reads_at(path, buffers[name], seen):
                    use(buffers[name], path)
            for swapped in one.swapping:
                self._join(path, swapped)

    def _reads_at(self, path: str, buffer: Tensor, seen: dict[str, ModuleTrace]) -> bool:
        """Whether a module reads another's buffer from its owner."""
        if any(one is buffer for one in self.named[path]._buffers.values()):
            return False
        return any(
            self.named[owner]._buffers.get(name) is buffer
            for owner, one in seen.items()
            for name in one.outside_reads
        )

    def _join(self, path: str, other: str) -> None:
        self.member_of.setdefault(path, path)
        self.member_of.setdefault(other, other)
        self.member_of[self._first(path)] = self._first(other)

    def _first(self, path: str) -> str:
        while self.member_of[path] != path:
            path = self.member_of[path]
        return path

    def _numbered(self, seen: dict[str, ModuleTrace]) -> Turns:
        expected: list[int] = []
        gates: dict[str, int] = {}  # by the first path
        modules: dict[str, int] = {}
        for path in self.named:
            if path not in self.member_of:
                continue
            first = self._first(path)
            if first not in gates:
                gates[first] = len(expected)
                expected.append(self._expected(first, seen))
            modules[path] = gates[first]
        carried: dict[str, dict[str, tuple[int, int]]] = {}
        for path in self.named:
            calls = seen[path].executions
            for name, uses in seen[path].carried_attributes.items():
                even = uses // calls if calls and uses % calls == 0 else 0
                carried.setdefault(path, {})[name] = (len(expected), even)
                outside = not calls or name in seen[path].outside_reads
                expected.append(0 if outside else calls)
        own = _by_path(seen, lambda one: one.own_attributes)
        restored = _by_path(seen, lambda one: one.restored_attributes)
        return Turns(expected, modules, self.reads, carried, own, restored)

    def _expected(self, first: str, seen: dict[str, ModuleTrace]) -> int:
        members = [path for path in self.member_of if self._first(path) == first]
        if any(path in self.unknown or not seen[path].executions for path in members):
            return 0
        return sum(seen[path].executions for path in members)


def _by_path(
    seen: dict[str, ModuleTrace], names_of: Callable[[ModuleTrace], tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    return {path: names for path, one in seen.items() if (names := names_of(one))}
