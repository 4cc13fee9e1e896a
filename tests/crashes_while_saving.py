"""Ends a process at every step of saving a checkpoint, and loads what is left.

    python crashes_while_saving.py FOLDER partial|full same|other

Every attempt saves a higher number, in the model, the optimizer and the user content,
and ends at its next write, sync, rename or removal; a write that it ends in is half done.
The last attempt gets through.  Prints how many attempts there were.
"""

import os
import sys

import torch

import smp

CHANGES = ("write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


def end_at(number: int) -> None:
    """Have this process end at its ``number``-th change of files."""
    count = 0

    def counting(name: str):
        real = getattr(os, name)

        def change(*args, **kwargs):
            nonlocal count
            count += 1
            if count < number:
                return real(*args, **kwargs)
            if name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            os._exit(3)

        return change

    for name in CHANGES:
        setattr(os, name, counting(name))


def main(folder: str, kind: str, tags: str) -> None:
    partial = kind == "partial"
    smp.init({})
    module = torch.nn.Linear(2, 2)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0, momentum=0.5))

    def fill(number: int) -> None:
        for parameter in module.parameters():
            parameter.data.fill_(number)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)

    def save(number: int) -> None:
        fill(number)
        smp.save_checkpoint(
            folder,
            "tag" if tags == "same" else f"tag{number}",
            partial=partial,
            model=model,
            optimizer=optimizer,
            user_content={"number": number},
            num_kept_partial_checkpoints=2,
        )

    def loaded() -> int:
        """The number in all parts of the newest checkpoint."""
        fill(-1)
        number = smp.resume_from_checkpoint(folder, partial=partial)["number"]
        for parameter in module.parameters():
            state = optimizer.state[parameter]["momentum_buffer"]
            assert (parameter == number).all(), f"model of {parameter}, content of {number}"
            assert (state == number).all(), f"optimizer state of {state}, content of {number}"
        return number

    save(0)
    last, number, ended = 0, 0, 3
    while ended == 3:
        number += 1
        child = os.fork()
        if child == 0:
            try:
                end_at(number)
                save(number)
            except BaseException as error:
                os.write(2, repr(error).encode())
                os._exit(4)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        got = loaded()
        assert got in (last, number), f"after {last} was saved and {number} tried: {got}"
        last = got
    assert ended == 0, f"exit code {ended}"
    assert last == number
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    if partial:
        assert len(os.listdir(folder)) <= 3, os.listdir(folder)  # two and "newest"
    print(number)


main(*sys.argv[1:])
