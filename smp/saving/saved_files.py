"""Files written whole or not at all, and checked when read.

``smp.save`` and ``smp.load``: torch's own file format, readable by ``torch.load``.  The format
is a zip archive with a CRC-32 of every record; ``read`` compares these, ``torch.load`` does
not.  No code in a file is run: the reader is ``weights_only=True``.
"""

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.saving import contents
from smp.state_mod import state

_LEGACY_TORCH = b"\x80\x02\x8a\x0a"  # files of torch.save before torch 1.6, without CRCs
_PIECE = 1 << 20
_SAVING = ".saving."


class CheckpointError(RuntimeError):
    """A saved file is damaged, or not the one asked for; the text names the file."""


def save(
    obj: Any,
    f: Any,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Write a value, as ``torch.save`` does, but whole or not at all.

    Args:
        obj: any value for ``torch.save``.
        f: path; or, where not ``partial``, an open file.
        partial: every rank writes a file of its own, ``f_{pp_rank}_{tp_rank}``.
        pickle_module, pickle_protocol: as for ``torch.save``.
        v3: with sharded state: ``f_{pp_rank}_{tp_rank}_{rdp_rank}``.

    Raises:
        OSError: the file cannot be written; nothing is left of it.

    Source: SageMaker Python SDK documentation, ``smp.save``.
    """
    if not partial and hasattr(f, "write"):
        torch.save(obj, f, pickle_module, pickle_protocol)
        return
    path = f"{os.fspath(f)}_{_suffix(v3)}" if partial else os.fspath(f)
    write(path, obj, pickle_module, pickle_protocol)


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    partial: bool = True,
    back_compat: bool = False,
    **load_args: Any,
) -> Any:
    """Read a file of :func:`save`; of a partial one, this rank's file.

    Args:
        f: the path given to :func:`save`, without the ranks behind it; or, where not
            ``partial``, an open file.
        map_location, pickle_module: as for ``torch.load``.
        partial: whether every rank wrote a file of its own.
        load_args: others of ``torch.load``.
        back_compat: ``f_{mp_rank}``, the name of the first versions, comes first; otherwise
            last.

    Raises:
        CheckpointError: the file is damaged (the text names the tensor), or holds other things
            than tensors and plain values.
        FileNotFoundError: none of the names exists.

    Source: SageMaker Python SDK documentation, ``smp.load``.
    """
    if pickle_module is not None:
        load_args["pickle_module"] = pickle_module
    if not partial:
        if hasattr(f, "read"):
            return torch.load(f, map_location, **load_args)
        return read(os.fspath(f), map_location, **load_args)
    first = f"{os.fspath(f)}_{state.job('smp.load').groups['mp'].index(_rank())}"
    names = [f"{os.fspath(f)}_{_suffix(v3)}" for v3 in (False, True)]
    names = [first, *names] if back_compat else [*names, first]
    for name in names:
        if os.path.exists(name):
            return read(name, map_location, **load_args)
    raise FileNotFoundError(f"smp.load: there is no {', no '.join(names)}")


def _rank() -> int:
    return state.job("smp.save").boot.rank


def _suffix(v3: bool) -> str:
    at = state.job("smp.save").placement.coordinates(_rank())
    return f"{at.pp}_{at.tp}_{at.rdp}" if v3 else f"{at.pp}_{at.tp}"


# --------------------------------------------------------------------------------- write


class _Writer:
    """An open file for ``torch.save``, where a failed write is not passed on."""

    def __init__(self, fd: int):
        self.fd = fd
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        while self.error is None and rest.nbytes:
            try:
                rest = rest[os.write(self.fd, rest) :]
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Writes are not buffered."""


def staged_name(path: str) -> str:
    """The name beside ``path`` of the file until it is whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, _SAVING + name)


def final_name(path: str) -> str:
    """The later name of a staged file, or of one in a staged folder."""
    return os.sep.join(part.removeprefix(_SAVING) for part in path.split(os.sep))


def write(path: str, value: Any, pickle_module: Any = pickle, protocol: int = 2) -> None:
    """``torch.save`` to a file, replaced once the new one is whole and on disk."""
    with _replaced(path) as fd:
        _save_to(fd, value, pickle_module, protocol)


def write_text(path: str, text: str) -> None:
    """The same for a line of text."""
    with _replaced(path) as fd:
        _write_all(fd, text.encode())


def write_in_staged_folder(path: str, value: Any) -> None:
    """``torch.save``, on disk on return; for a folder to be renamed when whole."""
    with _written(path) as fd:
        _save_to(fd, value, pickle, 2)


def sync_folder(path: str) -> None:
    """Names in the folder are on disk on return."""
    fd = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save_to(fd: int, value: Any, pickle_module: Any, protocol: int) -> None:
    writer = _Writer(fd)
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        module = contents if pickle_module is pickle else pickle_module
        torch.save(value, writer, module, protocol)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(crc)
    if writer.error is not None:
        raise writer.error


def _write_all(fd: int, data: bytes) -> None:
    writer = _Writer(fd)
    writer.write(data)
    if writer.error is not None:
        raise writer.error


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[int]:
    # Other ranks may write the same file: each writes its own, and the last whole one stands.
    rank = _rank() if state.is_initialized else 0
    folder, name = os.path.split(path)
    staged = staged_name(os.path.join(folder, f"{rank}.{os.getpid()}.{name}"))
    with _written(staged, path) as fd:
        yield fd
    os.replace(staged, path)
    sync_folder(os.path.dirname(path))


@contextlib.contextmanager
def _written(path: str, shown: str | None = None) -> Iterator[int]:
    """A file under construction; a failure removes it and raises an error with its name."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        if isinstance(error, OSError):
            if error.errno is None:  # of a saved object
                text = str(error) or type(error).__name__
                raise OSError(f"{shown or path}: {text}") from error
            raise OSError(error.errno, error.strerror, shown or path) from error
        raise


# ---------------------------------------------------------------------------------- read


def read_text(path: str) -> str:
    """The text written by `write_text`.

    Raises:
        CheckpointError: the file holds no text.
        FileNotFoundError: no such file exists.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"smp: {path} is damaged: {error}") from None


def read(path: str | Path, map_location: Any = None, **load_args: Any) -> Any:
    """``torch.load`` of a file after its checksums have been compared.

    Raises:
        CheckpointError: see :func:`load`.
    """
    path = os.fspath(path)
    _check(path)
    try:
        return _load(path, path, map_location, **load_args)
    except CheckpointError:
        raise
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise CheckpointError(f"smp: {path} is damaged: {error}") from error


def check_kinds(path: str, shown: str) -> None:
    """Make sure that the file can be read back, by its kinds; the tensors' data is not read.

    Args:
        shown: the file's later name.

    Raises:
        CheckpointError: a kind cannot be read back.
    """
    try:
        _load(path, shown, "meta")
    except CheckpointError:
        raise
    except (RuntimeError, NotImplementedError):  # not every tensor can be without data
        return


def _load(path: str, shown: str, map_location: Any, **load_args: Any) -> Any:
    """``torch.load``, with our words for kinds not read."""
    try:
        with contents.trusted(path):
            return torch.load(path, map_location, **load_args)
    except pickle.UnpicklingError as error:
        found = re.search(
            r"(?:unsupported (?:global|class)\S* (?:GLOBAL )?|but got <class ')([\w.]+)",
            str(error),
            re.I,
        )
        if found is None:
            raise CheckpointError(
                f"smp: {shown} is damaged, or holds what torch.load does not read: {error}"
            ) from error
        kind = found[1]
        raise CheckpointError(
            f"smp: {shown} holds a {kind}, which is not read because it could run code: save "
            "tensors and plain values (numbers, strings, lists, dicts) instead, or, if you "
            f"trust the file, call torch.serialization.add_safe_globals([{kind}]) before, or "
            "set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
        ) from error


def _check(path: str) -> None:
    """Compare every record of the archive with its CRC-32."""
    with open(path, "rb") as file:
        if file.read(len(_LEGACY_TORCH)) == _LEGACY_TORCH:
            return
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                try:
                    with archive.open(record) as stream:
                        while stream.read(_PIECE):
                            pass
                except Exception as error:
                    raise CheckpointError(
                        f"smp: {path} is damaged: {_what_is(path, record.filename)} does not "
                        f"have the bytes that were written ({error})"
                    ) from error
    except CheckpointError:
        raise
    except OSError:
        raise
    except Exception as error:  # zipfile's errors for bytes of no archive
        raise CheckpointError(f"smp: {path} is no checkpoint, or damaged: {error}") from error


def _what_is(path: str, record: str) -> str:
    """The place in the saved value of a record of the archive, in the user's names."""
    found = re.search(r"/data/(\d+)$", record)
    if found is None:
        return f"its record {record!r}"
    try:
        skeleton = torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # the archive is damaged elsewhere, too
        return f"its record {record!r}"
    names: dict[int, list[str]] = {}
    _name_storages(skeleton, "", names)
    # torch.save numbers the storages in the order of their first use.
    at = int(found[1])
    if at >= len(names):
        return f"its record {record!r}"
    return f"tensor '{list(names.values())[at][0]}'"


def _name_storages(value: Any, name: str, names: dict[int, list[str]]) -> None:
    if isinstance(value, Tensor):
        names.setdefault(value.untyped_storage()._cdata, []).append(name)
    elif isinstance(value, dict):
        for key, one in value.items():
            _name_storages(one, f"{name}.{key}" if name else str(key), names)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _name_storages(one, f"{name}.{number}" if name else str(number), names)
