"""Ranks of jobs that need not import torch again: ``python tests/fork_server.py SOCKET``.

Importing torch and smp costs more than most jobs of the tests do.  The server imports them
once and forks; a rank's own process, which a launcher has started, asks for a child that runs
its script, passes signals on to it and ends as it does::

    mpirun -np 2 python -IS tests/fork_server.py --ask SOCKET script.py ARGUMENTS

The child has the asking process's environment, folder and standard streams.  What the
interpreter or an import reads from the environment (``PYTHON*``, ``LD_PRELOAD``, limits,
namespaces) is the server's, and all children hash strings alike: a test to which that matters
starts its job with ``fresh=True``.
"""

import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ask(address: str, argv: list[str]) -> None:
    """Have ``argv`` run by a child of the server; ends as the child does."""
    import marshal  # reads and writes itself at once; importing pickle takes longer

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    wish = marshal.dumps((argv, dict(os.environ), os.getcwd()))
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    socket.send_fds(connection, [len(wish).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(wish)
    child = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")

    def pass_on(number: int, _frame: object) -> None:
        from contextlib import suppress

        with suppress(ProcessLookupError):  # it has ended, and how is about to be told
            os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def receive(connection: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]]:
    """A wish: arguments, environment, folder and standard streams."""
    import marshal

    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, wish = int.from_bytes(head, "little"), b""
    while len(wish) < size:
        if not (piece := connection.recv(size - len(wish))):
            raise EOFError
        wish += piece
    return (*marshal.loads(wish), streams)


def become(
    argv: list[str], environment: dict[str, str], folder: str, streams: list[int]
) -> None:
    """Make this child what ``python argv...`` would be when its script begins."""
    os.setsid()
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))


def run_script(path: str) -> None:
    """Run it as the interpreter does; a traceback does not show who started it."""
    import types

    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = path, __builtins__
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as script:
            code = compile(script.read(), path, "exec")
        exec(code, main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # The first frame is this one; a script that does not compile has no other.
        error.__traceback__ = error.__traceback__.tb_next or error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def serve(address: str) -> None:
    """Fork for whoever asks until pytest is gone; returns in each child, ready to run."""
    import selectors
    from contextlib import suppress

    waiting = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(sys.stdin.fileno(), selectors.EVENT_READ)
    os.write(sys.stdout.fileno(), b"ready")
    asked: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the child, who asked

    def fork(connection: socket.socket) -> bool:
        """Whether this is the child."""
        if (child := os.fork()) == 0:
            waiting.close()
            for each in (listener, connection, *(other for _, other in asked.values())):
                each.close()
            for pidfd in asked:
                os.close(pidfd)
            return True
        pidfd = os.pidfd_open(child)
        asked[pidfd] = child, connection
        waiting.register(pidfd, selectors.EVENT_READ)
        waiting.register(connection, selectors.EVENT_READ, pidfd)
        tell(connection, child)
        return False

    def tell(connection: socket.socket, number: int) -> None:
        with suppress(OSError):  # it may have been killed
            connection.sendall(number.to_bytes(8, "little"))

    def child_is_over(pidfd: int) -> None:
        child, connection = asked.pop(pidfd)
        waiting.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child, 0)
        if connection.fileno() >= 0:
            waiting.unregister(connection)
            tell(connection, status)
            connection.close()

    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    *wish, streams = receive(connection)
                except (OSError, EOFError):  # it was killed before it had asked
                    connection.close()
                    continue
                if fork(connection):
                    become(*wish, streams)
                    return
                for stream in streams:
                    os.close(stream)
            elif key.fileobj in asked:
                child_is_over(key.fileobj)
            elif key.data in asked:  # who asked was killed, and its child is with it
                child, connection = asked[key.data]
                waiting.unregister(connection)
                connection.close()
                os.kill(child, signal.SIGKILL)
            elif key.fileobj == sys.stdin.fileno():  # pytest has gone
                for child, _ in asked.values():
                    os.kill(child, signal.SIGKILL)
                os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        ask(sys.argv[2], sys.argv[3:])
    else:
        import smp  # noqa: F401  and torch with it

        serve(sys.argv[1])
        run_script(sys.argv[0])
