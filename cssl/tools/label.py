"""A page to label the images of a folder, with a model that learns while you do.

    cssl-label FOLDER [--classes=cat,dog] [--features=keras:MobileNetV2 | pixels]
    cssl-label FOLDER --finish

Prints the address of the page; Ctrl-C ends it. Labels stand in FOLDER/labels.csv the moment they are given, and the
next start goes on from there. --finish, or the page's button, trains on them, exports the model and classifies all
images, by commands that it prints; flags after -- go to that training. docs/labelling.md tells the whole way.
"""
from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import cssl
from cssl import cli, tools
from libml.errors import UserError
from libml.labelling.choose import ORDERS
from libml.labelling.session import HIDDEN, Session

FEATURES = "keras:MobileNetV2"


def add_features(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how images become features, as those of a run."""
    parser.add_argument("--features", default=FEATURES, help=f"{FEATURES} (default), another keras:NAME, or pixels, "
                        "which needs no weights")
    parser.add_argument("--weights", default="", metavar="FILE", help="of that network; default: imagenet, downloaded")
    parser.add_argument("--image_size", type=int, help="side to which images are resized")
    parser.add_argument("--nomirror", action="store_true", help="a mirrored image is another one: letters, digits")
    parser.add_argument("--data_dir", default="", help="folder for decoded images and features")


def run_flags(args: argparse.Namespace) -> dict:
    """Returns the options of a run that those flags mean."""
    given = {"features": args.features, "weights": args.weights, "image_size": args.image_size,
             "data_dir": args.data_dir and str(Path(args.data_dir).resolve())}
    return {name: value for name, value in given.items() if value not in (None, "")} | (
        {"mirror": False} if args.nomirror else {})


def points(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) <= 100:
            return value
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 100")


def free_folder(wanted: Path) -> Path:
    """Returns a folder that is not there yet: the one wanted, or with a number."""
    return next(path for path in (wanted, *(wanted.with_name(f"{wanted.name}-{k}") for k in range(2, 10_000)))
                if not path.exists())


def finish(session: Session, options: dict, further: Sequence[str], output: Path, tell: Callable[[str], None]) -> str:
    """Trains on the labels, with `further` flags, exports, predicts and reports, by commands that are printed; returns
    how it went."""
    known = [decision for n, decision in session.all().items() if n not in session.unreadable]
    trained = {decision.label for decision in known if decision.split == "train"}
    if len(trained) < 2:
        raise UserError(f"{f'Only {min(trained)!r}' if trained else 'No class'} has labels to train on; a classifier "
                        "needs two classes. Label more.")
    if only := {decision.label for decision in known if decision.label} - trained:
        raise UserError(f"The class {min(only)!r} has labels for measuring alone, none to train on. Label another "
                        "image of it, or merge it with another class.")
    output = free_folder(output)
    output.mkdir(parents=True)
    dataset = output / "dataset.csv"
    session.write_dataset(dataset)
    held = sum(line.endswith(",valid") for line in dataset.read_text(encoding="utf-8").splitlines())
    flags = [f"--{name}={value}" if value is not False else f"--no{name}" for name, value in options.items()]
    run, sets = str(output / "run"), ["--coverage=0.9"] * (held >= 9)
    commands = [["cssl", f"--dataset=csv:{dataset.resolve()}", *flags, *further, f"--train_dir={run}"],
                ["cssl-export", run, "-o", str(output / "export")],
                ["cssl-predict", run, str(session.folder.resolve()), f"--csv={output / 'predictions.csv'}", "--credal",
                 *sets],
                ["cssl-report", run, "-o", str(output / "report.html")]]
    (output / "commands.sh").write_text("".join(f"{shlex.join(command)}\n" for command in commands))
    results = []
    with (output / "finish.log").open("w", encoding="utf-8") as log:
        for program, *arguments in commands:
            print(shlex.join([program, *arguments]), flush=True)
            module = "cssl.cssl" if program == "cssl" else f"cssl.tools.{program.removeprefix('cssl-')}"
            process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True,
                                       stderr=subprocess.STDOUT, errors="backslashreplace")
            assert process.stdout
            line = ""
            for line in map(str.rstrip, process.stdout):
                log.write(f"{line}\n")
                if line.startswith(("Result", "Does it help")):
                    results.append(line)
                    print(line, flush=True)
                tell(f"{program}: {line[:160]}")
            if process.wait():
                raise UserError(f"{shlex.join([program, *arguments])} has failed: {line[:300]} ({output}/finish.log "
                                "has all of it)")
    return " ".join([*results, f"All of it is in {output}: export/, predictions.csv, report.html, and commands.sh, "
                               "which repeats it."])


def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of images, or one as docs/own_data.md lays out")
    parser.add_argument("--classes", default="", metavar="A,B,…", help="classes to begin with; the page makes others")
    add_features(parser)
    parser.add_argument("--labels", type=Path, metavar="FILE", help="default: FOLDER/labels.csv")
    parser.add_argument("--order", choices=ORDERS, default=ORDERS[0], help="which images come next (spread: those that "
                        "the model is unsure of, apart from each other)")
    parser.add_argument("--enough_gain", type=points, default=1.0, metavar="POINTS", help="it is enough when 50 "
                        "more labels are expected to add less (default 1)")
    parser.add_argument("--enough_accuracy", type=points, metavar="PERCENT", help="or when the interval of the "
                        "accuracy is above this")
    parser.add_argument("--read", type=Path, metavar="DIR|FILE", help="take labels from a folder <class>/** or from "
                        "Label Studio's JSON first")
    parser.add_argument("--write", type=Path, metavar="DIR|FILE", help="write labels as such a folder or JSON, and end")
    parser.add_argument("--finish", action="store_true", help="train, export and classify without the page, and end")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for what --finish makes; default: FOLDER_model")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at; others than this machine can then "
                        "reach the page")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    arguments, further = sys.argv[1:], list[str]()
    if "--" in arguments:
        at = arguments.index("--")
        arguments, further = arguments[:at], arguments[at + 1:]
    args = parser.parse_args(arguments)
    folder = args.folder.expanduser()
    session = Session(folder, [name for name in args.classes.split(",") if name.strip()], args.labels)
    output = args.output or folder.resolve().with_name(f"{folder.resolve().name}_model")
    with session.hold():
        for note in session.notes:
            tools.show(f"note: {note}")
        if args.read:
            from libml.labelling import exchange

            tools.show(f"{exchange.read(session, args.read)} labels from {args.read}")
        if args.finish:
            tools.show(finish(session, run_flags(args), further, output, lambda line: None))
            return
        cli.start_tensorflow()
        from libml.labelling import exchange
        from libml.labelling.learner import Learner, configuration
        from libml.labelling.server import Labelling, Server

        if args.write and args.write.suffix.lower() != ".json":
            tools.show(f"{exchange.write(session, args.write)} labels in {args.write}")
            return
        learner = Learner(session, configuration(cssl.method("CSSL"), session, **run_flags(args)), args.order)
        if args.write:
            learner.learn()
            tools.show(f"{exchange.write(session, args.write, learner.round)} labels in {args.write}")
            return
        server = Server(Labelling(
            session, learner, enough_gain=args.enough_gain, enough_accuracy=args.enough_accuracy,
            finish=lambda tell: finish(session, run_flags(args), further, output, tell)), args.host, args.port,
            folder / HIDDEN / "address.json")
        if not server.local:
            print(f"warning: --host={args.host}: whoever reaches this machine and learns the address can see the "
                  "images and change labels; nothing is encrypted.", file=sys.stderr)
        tools.show(f"{len(session.names)} images in {folder}, {len(session.all())} with a label. Labels go to "
                   f"{session.file}.\nOpen {server.address}\nCtrl-C ends it.")
        sys.stdout.flush()
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        sys.setswitchinterval(0.001)  # answers do not wait long for a thread that trains
        learner.start()
        threading.Thread(target=server.serve_forever, daemon=True, name="server").start()
        ended.wait()
        server.shutdown()
        learner.stop()
        tools.show(f"{len(session.decided)} labels in {session.file}")
    if learner.is_alive():  # it may be deep in TensorFlow, which an interpreter that ends does not survive
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
