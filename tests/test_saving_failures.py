"""Saving where something fails meanwhile: files, the file system, a rank."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import smp
from smp.saving import saved_files
from tests.models.trained import Run, trained
from tests.ranks import on_ranks, python
from tests.test_checkpoints import KINDS, listed, save


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writes beyond that size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def nothing_is_left(path: Path, partial: bool) -> Iterator[Run]:
    """In the block a save fails: "old" stays as it was, and "new" can be saved after it."""
    run = trained("sgd")
    save(run, path, "old", partial)
    smp.barrier()
    before = {name: (path / name).read_bytes() for name in listed(path)}
    smp.barrier()
    yield run
    smp.barrier()
    assert {name: (path / name).read_bytes() for name in listed(path)} == before
    assert not [file for file in path.iterdir() if file.name.startswith(".")]
    smp.barrier()
    save(run, path, "new", partial)
    assert smp.resume_from_checkpoint(path, partial=partial)["step"] == 3


@on_ranks(2)
@KINDS
def test_a_write_that_fails_is_an_error_on_every_rank_and_leaves_nothing(partial, tmp_path):
    """Disk full: the file is named, the previous checkpoint is as it was."""
    with nothing_is_left(tmp_path, partial) as run:
        fails = smp.rank() == (1 if partial else 0)
        expected = OSError if fails else smp.CheckpointError
        limit = file_size_limit(1000 if fails else resource.RLIM_INFINITY)
        with limit, pytest.raises(expected, match="File too large.*(model_1_0.pt|new)"):
            save(run, tmp_path, "new", partial)


@on_ranks(2)
@KINDS
@pytest.mark.parametrize("fails", ["sync_folder", "write_text"])
def test_a_save_that_fails_when_all_parts_are_written_leaves_nothing(
    fails, partial, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError("disk full")

    with nothing_is_left(tmp_path, partial) as run:
        expected = OSError if smp.rank() == 0 else smp.CheckpointError
        with monkeypatch.context() as patched, pytest.raises(expected, match="disk full"):
            patched.setattr(saved_files, fails, fail)
            save(run, tmp_path, "new", partial)


@on_ranks(2)
@pytest.mark.parametrize("differs", ["path", "tag"])
def test_a_folder_that_a_rank_does_not_see_is_said(differs, tmp_path):
    """As on two hosts without a file system in common."""
    run = trained("sgd")
    mine = f"of_{smp.rank()}"
    path, tag = (tmp_path / mine, "new") if differs == "path" else (tmp_path, mine)
    with pytest.raises(smp.CheckpointError, match="(?s)made by rank 0.*'.*of_1'.*same ones"):
        save(run, path, tag, True)


def test_a_text_that_cannot_be_written_is_said_and_leaves_what_was_there(tmp_path):
    path = tmp_path / "newest"
    saved_files.write_text(str(path), "old")
    with file_size_limit(4), pytest.raises(OSError, match=f"File too large: '{path}'"):
        saved_files.write_text(str(path), "longer")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_full_file_system_is_said_and_leaves_no_half_file(tmp_path):
    """A tmpfs of 1 MiB in a mount namespace of its own; the file is named."""
    script = (
        "import os, sys, smp, torch\n"
        "smp.init({})\n"
        "smp.save({'w': torch.zeros(1000)}, 'small', partial=False)\n"
        "try:\n"
        "    smp.save({'w': torch.zeros(10**6)}, 'large', partial=False)\n"
        "except OSError as error:\n"
        "    print(error)\n"
        "print(os.listdir('.'), smp.load('small', partial=False)['w'].numel())\n"
    )
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}" && cd "{tmp_path}" && exec "$0" "$@"'
    done = python(
        "-c", script, before=["unshare", "--mount", "--map-root-user", "sh", "-c", mount]
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == ("[Errno 28] No space left on device: 'large'\n['small'] 1000\n"), (
        done.stderr
    )
