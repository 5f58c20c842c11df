"""Runs, prints or submits the runs behind the paper's tables; what is finished already is not run again.

    cssl-reproduce --table=results|calibration|efficiency|ablation|barely|ups|all [--filter=cifar10.1@40]
        [--dry_run | --slurm=jobs.sbatch] [--train_dir=experiments] [--at_once=2] [-- FLAGS]

An interrupted run continues when the same command is given again. Each run trains in <train_dir>/kimg<length>; tables
share the runs they have in common. Flags after `--` are added to every command, or replace its own: in the table `ups`
thresholds that the paper does not give (`-- --conf_p=… --uncertainty_p=…`).
"""
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cssl
from cssl import cli, tools
from cssl.program import STOPPED, run_programs
from libml.devices.machine import usable_cores
from libml.errors import UserError, printable
from libml.results import paper
from libml.run import Run
from libml.writing import check_writable, write_text

AT_ONCE = "runs at the same time, each with its share of the cores (default: %(default)s)"


class Job(NamedTuple):
    """A training run: the method's class name and the flags that are given."""

    method: str
    flags: tuple[tuple[str, object], ...]

    def arguments(self) -> list[str]:
        return ["-m", f"cssl.{cssl.methods()[self.method]}", *(f"--{name}={value}" for name, value in self.flags)]

    def __str__(self) -> str:
        return "python " + shlex.join(self.arguments())

    def finished(self) -> Run | None:
        """Returns this run if it is on disk and has reached its end."""
        config = cli.configuration(cssl.method(self.method), self.arguments()[1:])
        run = Run(config.folder())
        return run if run.fulfils(config) else None


def jobs(table: paper.Table, train_dir: Path, extra: dict[str, str]) -> list[Job]:
    """Lists the runs behind a table, row by row; `extra` flags are added or take the place of its own."""
    found = []
    for row in table.rows:
        # A row's settings say how it differs from its neighbours; with this, a command speaks for itself.
        own = {} if row.method in paper.BASELINES else {"augment": paper.PROTOCOL["augment"]}
        for column, seed in itertools.product(row.cells, table.seeds):
            flags = {**own, **row.settings, "train_kimg": table.expected(row, column.dataset)["train_kimg"]}
            if table.schedule_kimg:
                flags["schedule_kimg"] = table.schedule_kimg
            flags |= extra
            place = {"dataset": f"{column.dataset}.{seed}@{column.labels}-1",
                     "train_dir": train_dir / f"kimg{flags['train_kimg']}"}
            found.append(Job(row.method, tuple({**place, **flags}.items())))
    return found


def split_flags(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments before `--`, and the --name=value flags behind it."""
    end = argv.index("--") if "--" in argv else len(argv)
    flags = {}
    for flag in argv[end + 1:]:
        match = re.fullmatch(r"--(\w+)=(.*)", flag)
        if not match:
            raise UserError(f"Malformed flag {flag!r} after `--`: expected --name=value.")
        flags[match[1]] = match[2]
    return argv[:end], flags


def run_all(todo: list[Job], at_once: int = 1, keep: Callable[[Run], None] | None = None) -> int:
    """Runs jobs, so many at a time; a failed one does not stop the rest, a signal does. Where several run, what they
    print is in their folders alone, but for the errors of those that fail. `keep` gets each run that has finished."""
    if not 1 <= at_once <= usable_cores():
        raise UserError(f"--at_once={at_once}: expected 1 to {usable_cores()}, the number of cores.")
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder, str(number)) for number in range(len(todo))]

        def start(number: int) -> subprocess.Popen:
            print(f"[{number + 1}/{len(todo)}] {todo[number]}", flush=True)
            command = [sys.executable, *todo[number].arguments()]
            if at_once == 1:
                return subprocess.Popen(command)
            with errors[number].open("w") as file:
                return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)

        def ended(number: int) -> None:
            if keep and (run := todo[number].finished()):
                keep(run)

        codes = run_programs(len(todo), start, at_once, ended)
        for code in codes.values():
            if code in STOPPED:
                return code
        for number, code in codes.items():
            if code:
                said = errors[number].read_text(errors="replace") if at_once > 1 else ""
                print(f"{said}failed: {todo[number]}", file=sys.stderr)
        return int(any(codes.values()))


def main() -> int:
    argv, extra = split_flags(sys.argv[1:])
    parser = tools.parser(__doc__)
    parser.add_argument("--table", required=True, choices=(*paper.TABLES, "all"))
    parser.add_argument("--filter", default="", help="keep the commands that contain this text")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry_run", action="store_true", help="print the commands of what is missing")
    instead.add_argument("--slurm", nargs="?", type=Path, const=Path("reproduce.sbatch"), metavar="FILE",
                        help="write a SLURM array script instead of running (default: %(const)s)")
    parser.add_argument("--train_dir", type=Path, default=Path("experiments"), help="default: %(default)s")
    parser.add_argument("--at_once", type=int, default=1, help=AT_ONCE)
    args = parser.parse_args(argv)
    names = tuple(paper.TABLES) if args.table == "all" else (args.table,)
    listed = (job for name in names for job in jobs(paper.TABLES[name], args.train_dir, extra))
    found = [job for job in dict.fromkeys(listed) if args.filter in str(job)]
    if not found:
        raise UserError(f"No run of table {args.table} contains --filter={args.filter}; --dry_run without a filter "
                        "lists them.")
    todo = [job for job in found if not job.finished()]
    rebuilt = sorted({job.method for job in todo} & {*paper.RECONSTRUCTIONS})
    if len(todo) < len(found):
        print(f"note: {len(found) - len(todo)} of {len(found)} runs are finished", file=sys.stderr)
    if rebuilt:
        print(f"note: reconstructions, whose results are compared with no figure of the paper: {', '.join(rebuilt)}",
              file=sys.stderr)
    if args.slurm and todo:
        script = Path(__file__).with_name("array.sbatch").read_text()  # a template of str.format
        head = re.escape(script.partition("commands=")[0])  # with lines of the user's own it is not overwritten
        check_writable(args.slurm, re.sub(r"\\{\w+\\}", r"[^\\n]*", head).encode())
        lines = "\n".join(f"  {shlex.quote(str(job))}" for job in todo)
        requeue = Path(__file__).with_name("run_and_requeue.sh").read_text()
        path = printable(shlex.quote(str(args.slurm)))  # it stands in a comment, which a new line would end
        write_text(args.slurm, script.format(path=path, name=args.table, last=len(todo) - 1, commands=lines,
                                             folder=shlex.quote(os.getcwd()), requeue=requeue))
        print(f"{path}: {len(todo)} tasks")
    elif args.dry_run:
        print("".join(f"{job}\n" for job in todo), end="")
    elif not args.slurm:
        return run_all(todo, args.at_once)
    return 0


if __name__ == "__main__":
    tools.exit_on_user_error(main)
