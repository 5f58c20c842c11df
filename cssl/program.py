"""What all programs of the project share: how they end, and how one runs another."""
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from libml.errors import OptionError, UserError

STOPPED = (130, 143)  # exit codes after SIGINT and SIGTERM: the state is saved, the same command continues


def exit_on_user_error(main: Callable[[], int | None]) -> None:
    """Runs a program's main function and exits; a UserError becomes one line on stderr and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter still gets the line
    try:
        sys.exit(main())
    except UserError as error:
        flag = "--" if isinstance(error, OptionError) else ""
        print(f"error: {flag}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:  # a path that no file system takes, a disk that fails
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run_program(command: list[str], **options) -> int:
    """Runs a program to its end and returns its exit code; a signal to this one stops that one, which then saves.

    After a signal the exit code is that of STOPPED, however the program ended: who runs several runs no more of them.
    """
    process: subprocess.Popen | None = None
    received: list[int] = []

    def stop(number: int, _) -> None:
        received.append(number)
        if process and number == signal.SIGTERM:  # a terminal sends SIGINT to both
            process.terminate()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, **options)
        if signal.SIGTERM in received:  # it came when the program had been started, but was not yet known here
            process.terminate()
        code = process.wait()
        return 128 + received[0] if received else code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
