"""What all programs of the project share: how they end, and how one runs another."""
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

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
    """Runs a program to its end and returns its exit code, as `run_programs` does."""
    return run_programs(1, lambda _, **pinned: subprocess.Popen(command, **options, **pinned))[0]


def run_programs(count: int, start: Callable[..., subprocess.Popen], at_once: int = 1,
                 ended: Callable[[int], None] = lambda number: None) -> dict[int, int]:
    """Runs programs to their ends, some at a time, each on its share of the cores, and returns exit codes by number.

    A signal to this process, or to one of the programs, stops those that run, which then save. No other starts after
    that, and the exit codes of these and those are of STOPPED, however they ended.

    Args:
        count: how many programs there are.
        start: starts one of them, given its number and arguments of Popen.
        at_once: how many run at the same time.
        ended: called with the number of each that has ended, however it did.
    """
    running: dict[int, tuple[int, subprocess.Popen]] = {}  # by their share of the cores
    codes: dict[int, int] = {}
    received: list[int] = []

    def stop(number: int, _) -> None:
        received.append(number)
        if number == signal.SIGTERM:  # a terminal sends SIGINT to all
            for _, process in running.values():
                process.terminate()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        waiting = list(range(count))
        while running or waiting and not received:
            free = [share for share in range(at_once) if share not in running]
            if free and waiting and not received:
                number = waiting.pop(0)
                process = start(number, **_pinned(free[0], at_once))
                running[free[0]] = number, process
                if signal.SIGTERM in received:  # it came when the program had been started, but was not yet known here
                    process.terminate()
                continue
            with suppress(subprocess.TimeoutExpired):
                next(iter(running.values()))[1].wait(0.2 if at_once > 1 else None)
            for share, (number, process) in list(running.items()):
                if process.poll() is not None:
                    del running[share]
                    if process.returncode in STOPPED and not received:  # by somebody else, who will mean all of them
                        stop(process.returncode - 128, None)
                    codes[number] = 128 + received[0] if received else process.returncode
                    ended(number)
        return codes | {number: 128 + received[0] for number in waiting}
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _pinned(share: int, shares: int) -> dict:
    """Returns arguments of Popen that leave a program its share of the cores."""
    if not hasattr(os, "sched_setaffinity"):  # only Linux has it
        return {}
    cores = sorted(os.sched_getaffinity(0))[share::shares]
    return {"preexec_fn": lambda: os.sched_setaffinity(0, cores)} if shares > 1 and cores else {}
