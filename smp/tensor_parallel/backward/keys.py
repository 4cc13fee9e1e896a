"""Keys of collectives: by them the core sees that the ranks make the same one.

Two modules of equal sizes make equal operations: ranks in the first and ranks in the second
would add up slices of two modules.  So every collective of a module sends its key (``key`` in
csrc/comm/collective/checks/call.h), and so does that of a sharded parameter.  A key is 32 bits:
from the path of the module and the phase, 22; from the call and the collective in it, 10.
"""

import hashlib

from smp import _core
from smp.marks import PATH
from smp.modules import live_models

_OF_CALL = 10  # bits
_OF_MODULE = 32 - _OF_CALL
_MODULES, _CALLS = 2**_OF_MODULE, 2**_OF_CALL

# Odd: keys less than 2**10 apart do not meet.
_A_PHASE = 0x9E377
_A_COLLECTIVE = 331

_numbers: dict[str, int] = {}  # of paths in use
_parameters: dict[int, str] = {}  # names by key


def of_collective(path: str, phase: int, call: int, collective: int) -> int:
    """The key of a collective; the same in every process.

    Args:
        path: of the module.
        phase: by its number in ``_core.phases``.
        call: a number of the call, or of its backward, alike on all tp_ranks.
        collective: the number of the call's collectives before.
    """
    number = _numbers.get(path)
    if number is None:
        number = _numbers[path] = _number_of(path)
    of_module = (number + phase * _A_PHASE) % _MODULES
    return of_module * _CALLS + (call + collective * _A_COLLECTIVE) % _CALLS


def of_parameter(name: str) -> int:
    """The key of a gathering of a sharded parameter; the same in every process.

    Args:
        name: in its model.
    """
    key = _number_of(name) * _CALLS
    _parameters[key] = name
    return key


def _number_of(path: str) -> int:
    digest = hashlib.blake2b(path.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % _MODULES


def tell_unlike(error: BaseException) -> bool:
    """Whether a collective has failed because other tp_ranks made one of another module."""
    return isinstance(error, _core.Error) and len(error.keys) > 1


def explained(error: BaseException) -> str:
    """An error's text, with modules in the place of keys."""
    said = str(error)
    if not isinstance(error, _core.Error) or not error.keys:
        return said
    paths = {*_numbers, *_paths_of_models()}
    for key in error.keys:
        said = said.replace(f"{_core.WITH_KEY}{key:08x}", _in_words(paths, key))
    if len(error.keys) > 1 and len({key // _CALLS for key in error.keys}) == 1:
        said += "; these are two calls of the module, or two collectives of one call"
    return said


def _in_words(paths: set[str], key: int) -> str:
    if key in _parameters:
        return f" for parameter '{_parameters[key]}'"
    of_module = key // _CALLS
    named = sorted(
        f"module '{path}' ({_core.phases[phase]})"
        for path in paths
        for phase in range(len(_core.phases))
        if (_number_of(path) + phase * _A_PHASE) % _MODULES == of_module
    )
    return f" for {' or '.join(named) or 'a module that this rank does not know'}"


def _paths_of_models() -> list[str]:
    return [
        module.__dict__[PATH]
        for model in live_models.living()
        for module in model.modules()
        if PATH in module.__dict__
    ]
