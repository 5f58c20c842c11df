"""Classifies image files with a trained run or an export.

    cssl-predict RUN_OR_EXPORT FILES_OR_FOLDERS … [--csv=FILE | --json]

Prints CSV with the columns file, class, probability. --all adds the whole distribution, --credal the credal set
that the method would have used as label (CSSL, C2S2L), --coverage=0.9 the classes of which the true one is one with
that probability. --sort=uncertainty puts first what to label next. Images of any size are resized as
training folders are. Files that cannot be read are listed on stderr at the end; if none can, the exit code is 2.
"""
from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import cssl
from cssl import cli, tools
from libml.errors import UserError, printable
from libml.writing import check_writable, write_atomically

CSV = rb"file,class,probability(,credal_class)?(,alpha)?(,credal_set)?(,set)?(,\"?p_[^\n]*)?\n"  # how ours begin


def quoted(name: str) -> str:
    """Returns a class's name as a member of a set: in quotes where it has a bar or a quote itself."""
    return '"' + name.replace('"', '""') + '"' if {"|", '"'} & set(name) else name


def to_csv(records: list[dict], escape: Callable[[str], str] = str) -> str:
    """Formats records as CSV: a distribution as a column per class, a set as its members with bars between."""
    rows = []
    for record in records:
        row = {f"p_{name}": p for name, p in record.pop("probabilities", {}).items()}
        if "set" in record:
            record["set"] = "|".join(map(quoted, record["set"]))
        rows.append({escape(name): escape(value) if isinstance(value, str) else value
                     for name, value in (record | row).items()})
    lines: list[str] = []  # csv quotes what holds a letter of its own end of lines, \r\n, and writes line by line
    writer = csv.DictWriter(SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n") + "\n")), rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return "".join(lines)


def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("run", help="run folder, checkpoint, or folder of an export")
    parser.add_argument("files", nargs="+", help="image files, or folders that are searched for them")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--csv", type=Path, metavar="FILE", help="write the CSV there instead of printing it")
    output.add_argument("--json", action="store_true", help="print a JSON list instead")
    parser.add_argument("--all", action="store_true", help="the probability of every class too")
    parser.add_argument("--credal", action="store_true", help="the credal set that the method would have used as label")
    parser.add_argument("--coverage", type=float, help="of conformal sets, from the run's validation images")
    parser.add_argument("--sort", choices=("uncertainty",), help="most uncertain files (1 - max p) first")
    parser.add_argument("--data_dir", default="", help="folder of the TFDS datasets; default: the run's")
    args = parser.parse_args()
    if args.csv:
        check_writable(args.csv, CSV)
    cli.start_tensorflow()
    from libml.results.predict import EXPORT_FILE

    is_export = (Path(args.run) / EXPORT_FILE).exists()
    opened = cssl.open_export(args.run) if is_export else cssl.open(args.run, data_dir=args.data_dir)
    found = opened.predict(args.files, credal=args.credal)
    if not found.files:
        file, reason = found.unreadable[0]
        raise UserError(f"None of the {len(found.unreadable)} files can be read as an image; the first, {file}: "
                        f"{reason}")
    if args.sort:
        found = found.by_uncertainty()
    records = found.records(whole=args.all, coverage=args.coverage)
    if args.csv:
        text = to_csv(records).encode("utf-8", "surrogateescape")  # names of files keep their bytes
        write_atomically(args.csv, lambda file: file.write(text))
    elif args.json:
        print(json.dumps(records, indent=1))
    elif tools.on_terminal():
        print(to_csv(records, printable), end="")  # a name may hold what commands a terminal
    else:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding == "utf-8":
            sys.stdout.reconfigure(errors="surrogateescape")  # names of files keep their bytes
        print(to_csv(records), end="")
    for note in found.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    for file, reason in found.unreadable:
        print(f"unreadable: {printable(file)} ({printable(reason)})", file=sys.stderr)
    if found.unreadable:
        print(f"{len(found.unreadable)} of {len(found.unreadable) + len(found.files)} files could not be read.",
              file=sys.stderr)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
