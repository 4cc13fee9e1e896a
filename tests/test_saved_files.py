"""What `smp.save_checkpoint` and `smp.save` refuse, and how they say what went wrong."""

import pytest
import torch

import smp
from tests.models.trained import Run, init
from tests.ranks import on_ranks
from tests.test_checkpoints import KINDS, listed, save


class Raises:
    """Cannot be saved."""

    def __init__(self, error: Exception):
        self.error = error

    def __reduce__(self):
        raise self.error


ERRORS = {
    "RuntimeError": RuntimeError(),
    "KeyError: 'mine'": KeyError("mine"),
    "OSError": OSError(),
    "user_content.*: mine": OSError("mine"),
    "No space left.*user_content": OSError(28, "No space left"),
}


@on_ranks(2)
@KINDS
def test_an_error_of_what_is_saved_is_one_on_every_rank_with_or_without_text(partial, tmp_path):
    """Nothing is left of the checkpoint, and the next one is saved."""
    init(2)
    run = Run("sgd")
    run.train(0, 1)
    for told, error in ERRORS.items():
        kind, text = smp.CheckpointError, f"on rank 0: .*{told}"
        if smp.rank() == 0:
            kind, text = type(error), told if "user_content" in told else ""
        with pytest.raises(kind, match=text):
            smp.save_checkpoint(
                tmp_path, "t", partial, model=run.model, user_content=Raises(error)
            )
        smp.barrier()
        assert listed(tmp_path) == []
        smp.barrier()
    save(run, tmp_path, "t", partial)
    assert smp.resume_from_checkpoint(tmp_path, partial=partial)["step"] == 3


@on_ranks(2)
def test_a_rank_that_fails_between_what_ranks_do_together_keeps_its_own_error(
    tmp_path, monkeypatch
):
    """The others meet another call than theirs; where it began is the cause."""
    init(2)
    run = Run("sgd")
    run.train(0, 1)
    own = LookupError("mine")

    def fail(*_, **__):
        raise own

    if smp.rank() == 1:
        monkeypatch.setattr(type(run.model), "state_dict", fail)
    with pytest.raises(smp.CallMismatch) as caught:
        smp.save_checkpoint(tmp_path, "t", partial=False, model=run.model)
    assert smp.rank() == 0 or caught.value.__cause__ is own


@on_ranks(2)
def test_tags_that_are_files_of_other_checkpoints_are_refused(tmp_path):
    """Of full ones, and what is no name of a file; nothing is written.

    A partial one is a folder with a name that none of them has.
    """
    init(2)
    run = Run("sgd")
    run.train(0, 1)
    save(run, tmp_path, "a", partial=False)
    smp.barrier()
    before = {name: (tmp_path / name).read_bytes() for name in listed(tmp_path)}
    smp.barrier()
    for tag in "", ".", "..", ".a", "a/b", "/a", "a/":
        for partial in True, False:
            with pytest.raises(ValueError, match="plain file name, not"):
                save(run, tmp_path, tag, partial)
    for tag in "newest", "optimizer_a", "user_content_a", "parts_a", "a_partial":
        with pytest.raises(ValueError, match=f"'{tag}'.*give it another tag"):
            save(run, tmp_path, tag, partial=False)
    assert {name: (tmp_path / name).read_bytes() for name in listed(tmp_path)} == before
    smp.barrier()
    for tag in "newest", "optimizer_a":
        save(run, tmp_path, tag, partial=True)
        assert smp.resume_from_checkpoint(tmp_path)["step"] == 3


def odd_strides() -> list[torch.Tensor]:
    """One element each, with the strides of what they are a part of."""
    long = torch.arange(10.0)
    return [long[::5][:1], long.view(2, 5)[:1, 1:2], long.view(5, 2).t()[1:, 3:4]]


@on_ranks(2)
def test_single_elements_with_odd_strides_are_saved_whole(tmp_path):
    """In an optimizer's state, which is gathered tensor by tensor."""
    init(2)
    run = Run("sgd")
    run.train(0, 1)
    odd = odd_strides()
    for parameter in run.model.local_parameters():
        run.optimizer.state[parameter]["odd"] = odd[smp.rank()]
    save(run, tmp_path, "t", partial=False)
    if smp.rank() == 0:
        saved = torch.load(tmp_path / "optimizer_t", weights_only=True)["state"].values()
        got = {float(one["odd"]): one["odd"].shape for one in saved}
        assert got == {float(one): one.shape for one in odd[:2]}
