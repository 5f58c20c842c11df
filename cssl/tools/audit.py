"""Lists what may be wrong with the images and labels of a folder, as CSV.

    cssl-audit FOLDER [--features=keras:MobileNetV2 | pixels] [--csv=FILE]

FOLDER is one for cssl-label: its labels.csv counts, and folders as docs/own_data.md lays out. Columns: file, kind
(label: the others contradict it; duplicate, within or between train and test; strange: unlike any labelled image;
blank; unreadable), score (the smaller, the worse), label, suggested, other (the image that it is like), told.
"""
from __future__ import annotations

import contextlib
import csv
import io
import sys
from pathlib import Path

import cssl
from cssl import cli, tools
from cssl.tools.label import add_features, run_flags
from libml.labelling.session import Session
from libml.writing import check_writable, write_text

COLUMNS = ("file", "kind", "score", "label", "suggested", "other", "told")


def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("folder", type=Path)
    add_features(parser)
    parser.add_argument("--labels", type=Path, metavar="FILE", help="default: FOLDER/labels.csv")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the CSV there instead of printing it")
    args = parser.parse_args()
    if args.csv:
        check_writable(args.csv, ",".join(COLUMNS).encode())
    session = Session(args.folder.expanduser(), labels=args.labels)
    cli.start_tensorflow()
    from libml.labelling import learner
    from libml.labelling.audit import findings

    config = learner.configuration(cssl.method("CSSL"), session, **run_flags(args))
    with contextlib.redirect_stdout(sys.stderr):  # where progress goes: the CSV may be piped
        data, numbers, bad = learner.prepare(config, session)
    known = session.all()
    found = findings(learner.Heads(config, data), numbers, known, session.names, bad)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in found:
        writer.writerow([session.names[one.number], one.kind, f"{one.score:.4g}",
                         known[one.number].label if one.number in known else "", one.suggested,
                         session.names[one.other] if one.other >= 0 else "", one.told])
    if args.csv:
        write_text(args.csv, text.getvalue())
    else:
        print(text.getvalue(), end="")
    kinds = {kind: sum(one.kind == kind for one in found) for kind in ("label", "duplicate", "strange", "blank",
                                                                       "unreadable")}
    print(f"{len(session.names)} images: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
          file=sys.stderr)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
