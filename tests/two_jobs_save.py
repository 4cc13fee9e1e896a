"""A job saves into a folder where another one is saving: ``python two_jobs_save.py FOLDER``.

The other one is a fork, which stops in the middle of a file until this one has tried.  Prints
this one's error, and what the folder holds at the end.
"""

import os
import sys

import torch

import smp


def save(folder: str, tag: str) -> None:
    smp.save_checkpoint(folder, tag, user_content={"tag": tag})


def save_slowly(folder: str, begun: int, go_on: int) -> None:
    real = os.fsync

    def stop_once(fd: int) -> None:
        os.fsync = real
        os.write(begun, b".")
        os.read(go_on, 1)
        real(fd)

    os.fsync = stop_once
    save(folder, "first")


def main(folder: str) -> None:
    smp.init({})
    smp.DistributedModel(torch.nn.Linear(2, 2))
    begun, tried = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_slowly(folder, begun[1], tried[0])
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    os.read(begun[0], 1)
    try:
        save(folder, "second")
    except smp.CheckpointError as error:
        print(str(error).replace(str(child), "PID"))
    os.write(tried[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(smp.resume_from_checkpoint(folder))
    save(folder, "second")
    print(smp.resume_from_checkpoint(folder), sorted(os.listdir(folder)))


main(*sys.argv[1:])
