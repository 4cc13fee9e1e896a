"""The way of an exception on one rank to the same exception on every rank."""

import pickle
import traceback
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from smp import _core
from smp.marks import TOLD
from smp.modules import live_models
from smp.modules.live_models import LiveModel
from smp.runtime_state import Runtime

IN_PARTITION = -1  # in place of a microbatch
_CALL = nn.Module._call_impl.__name__  # in its frames ``self`` is a called module


class StepAborted(BaseException):
    """Unwinds a worker after the step's failure elsewhere; user code does not see it.

    The class is no ``Exception``, so ``except Exception`` in a model lets it pass.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on an accelerator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def as_failure(error: BaseException) -> BaseException:
    """The exception of a failed step: an exit with the look of success becomes an error."""
    if not isinstance(error, SystemExit) or error.code:
        return error
    failure = RuntimeError(
        f"smp: sys.exit({'' if error.code is None else error.code}) inside a step, which the "
        "other ranks are in, too: end the script after the step"
    )
    failure.__cause__ = error
    return failure


def module_of(error: BaseException, models: Iterable[LiveModel]) -> str | None:
    """The path of the innermost module around the error; None: none."""
    called = [
        frame.f_locals.get("self")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == _CALL
    ]
    paths = {id(m): path for one in models for path, m in one.module.named_modules()}
    return next((path for m in reversed(called) if (path := paths.get(id(m)))), None)


def describe(
    error: BaseException, path: str | None, microbatch: int, phase: int, who: str
) -> tuple:
    """The error's description for the other ranks: plain values, and a pickle of the error.

    An error from another rank keeps that rank.

    Args:
        who: the rank, as in :attr:`Runtime.name`.
    """
    told = told_of(error)
    if told is not None:
        return told
    text = "".join(traceback.format_exception(error))
    pickled = _pickled(error) or pickle.dumps(Parts.of(error))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return who, path, microbatch, phase, kind, str(error), text, pickled


def describe_of_task(
    rt: Runtime, error: BaseException, path: str | None, microbatch: int, phase: int
) -> tuple:
    """The description of a task's error on this rank, whose step keeps both.

    Args:
        path: of the task's module; None: it is looked for.
    """
    error = as_failure(error)
    if path is None:
        path = module_of(error, live_models.living())
    told = describe(error, path, microbatch, phase, rt.name)
    rt.local_errors.append((told, error))
    return told


def _pickled(value: object) -> bytes:
    """The value's pickle for another rank; empty: it cannot be pickled."""
    try:
        pickled = pickle.dumps(value)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - values of any shape may come
        return b""
    return pickled


class Parts(NamedTuple):
    """The parts of an exception that other ranks can build, where it cannot be pickled.

    Most often its class gives ``Exception.__init__`` other arguments than it takes, and pickle
    cannot call it.  The exception is then made without that call, of the same class.
    """

    base: type[BaseException]  # the class, or the first of its importable bases
    names: dict[str, str]  # the class's own
    args: tuple
    state: dict[str, Any]
    message: str
    is_whole: bool

    @classmethod
    def of(cls, error: BaseException) -> "Parts":
        """The error's parts for other ranks."""
        kind = type(error)
        base = next(each for each in kind.__mro__ if _pickled(each))
        given: Any = BaseException.__reduce__(error)[1]
        if isinstance(error, OSError):
            given = OSError.__reduce__(error)[1]  # with the names of files
        args = given if _pickled(given) else (str(error),)
        state = {name: value for name, value in vars(error).items() if _pickled(value)}
        is_whole = base is kind and args is given and len(state) == len(vars(error))
        names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
        return cls(base, names, args, state, str(error), is_whole)

    def rebuilt(self) -> BaseException:
        """The exception; if parts are missing, of a subclass with the name and the text."""
        made: Any = self.base
        if not self.is_whole:
            text = self.message
            own = {**self.names, "__str__": lambda error: text}
            made = type(self.names["__qualname__"].rpartition(".")[2], (made,), own)
        builtin = next(each for each in made.__mro__ if each.__module__ == "builtins")
        error = builtin.__new__(made, *self.args)
        builtin.__init__(error, *self.args)
        error.__dict__.update(self.state)
        return error


def told_of(error: BaseException) -> tuple | None:
    """The description behind an error on the way to its caller's rank."""
    return getattr(error, TOLD, None)


def raised_there(description: tuple) -> BaseException:
    """The exception of a module of another rank, for its caller here."""
    error = rebuild(description, None)
    error.__dict__[TOLD] = description
    return error


def rebuild(description: tuple, local: BaseException | None) -> BaseException:
    """The exception to raise from the step: the original one, with a note.

    Args:
        description: from :func:`describe`, on any rank.
        local: the exception itself, on the rank where it was raised.
    """
    who, path, microbatch, phase, kind, message, text, pickled = description
    error: Any = local
    if local is not None and told_of(local) is not None:
        return local
    if error is None and pickled:
        try:
            error = pickle.loads(pickled)
            error = error.rebuilt() if isinstance(error, Parts) else error
        except Exception:  # noqa: BLE001 - a class that this rank cannot build
            error = None
    if error is None:
        error = RuntimeError(f"{kind}: {message}")
    where = "the step function" if path is None else f"module '{path}'"
    where += f", microbatch {microbatch}, {_core.phases[phase]}"
    if microbatch == IN_PARTITION:
        where = "the partition of the model"
    note = f"raised on {who} in {where}"
    if local is None:
        note += f"; there:\n{text}"
    add_note(error, note)
    return error


def add_note(error: BaseException, note: str) -> None:
    """Show a sentence with the error's traceback."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # before Python 3.11
        error.args = (f"{error}\n{note}",)
