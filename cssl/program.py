"""What all programs of the project share: how they end, and how one runs another."""
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from libml.errors import OptionError, UserError

STOPPED = (130, 143)  # exit codes after SIGINT and SIGTERM: the state is saved, the same command continues


def exit_on_user_error(main: Callable[[], int | None]) -> None:
    """Runs a program's main function and exits; a UserError becomes one line on stderr and its exit code."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # else a file of ours would take the place of a closed
        pass  # stream, and libraries would write into it what they say to a terminal
    os.close(number)
    sys.stdout, sys.stderr = (stream or open(number, "w", closefd=False)
                              for number, stream in ((1, sys.stdout), (2, sys.stderr)))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter still gets the line
    try:
        sys.exit(main())
    except UserError as error:
        flag = "--" if isinstance(error, OptionError) else ""
        print(f"error: {flag}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:  # a path that no file system takes, a disk that fails
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run_programs(count: int, start: Callable[[int], subprocess.Popen], at_once: int = 1,
                 ended: Callable[[int], None] = lambda number: None) -> dict[int, int]:
    """Runs programs to their ends, each on its share of the cores, and returns exit codes by number.

    `start` starts one, given its number, and `ended` is called with that of each that has ended. A signal to this
    process, or to one of the programs, stops those that run, which then save. No other starts after that, and the exit
    codes of these and those are of STOPPED, however they ended.
    """
    running: set[subprocess.Popen] = set()
    received: list[int] = []
    shares = iter(range(at_once))
    one_by_one = Lock()

    def stop(number: int, _=None) -> None:
        received.append(number)
        if number == signal.SIGTERM:  # a terminal sends SIGINT to all
            for process in list(running):
                process.terminate()

    def pin() -> None:
        cores = sorted(os.sched_getaffinity(0))[next(shares)::at_once] if hasattr(os, "sched_getaffinity") else []
        if cores:  # this thread's, and of what it starts; only Linux has such shares
            os.sched_setaffinity(0, cores)

    def run(number: int) -> int:
        if received:
            return 128 + received[0]
        process = start(number)
        running.add(process)
        if signal.SIGTERM in received:  # it came when the program had been started, but was not yet known here
            process.terminate()
        code = process.wait()
        running.remove(process)
        if code in STOPPED and not received:  # by somebody else, who will mean all of them
            stop(code - 128)
        with one_by_one:
            ended(number)
        return 128 + received[0] if received else code

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ThreadPoolExecutor(at_once, initializer=pin) as pool:
            return dict(enumerate(pool.map(run, range(count))))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
