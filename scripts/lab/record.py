"""A record of finished runs in one text file, a line each: what tables and figures need, without weights and images."""
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import cssl
from libml.config import RunConfig
from libml.results.metrics import METRICS
from libml.run import Run
from libml.writing import write_text

TAGS = (*METRICS, "accuracy/valid", "ece/valid", "monitors/mask", "monitors/alpha", "monitors/pseudo_accuracy",
        "images_per_s")
DIGITS = {"accuracy": 12}  # a share of the images: equal results must stay equal, and differences add up to nothing
CREDAL = ("truth", "upper")  # within report["credal"]; see `credal_coverage`
ENVIRONMENT = ("commit", "python", "tensorflow", "keras", "machine", "devices", "started")
PLACES = ("data_dir", "train_dir")  # of the machine that made a run


def _short(value: float | None, digits: int = 5) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _entry(run: Run) -> dict:
    facts = run.described("args/environment.json")
    columns = {tag: [report.get(tag) for report in run.reports] for tag in TAGS}
    columns |= {f"credal/{name}": [report.get("credal", {}).get(name) for report in run.reports] for name in CREDAL}
    entry = {"config": {name: value for name, value in run.settings.items() if name not in PLACES},
             "environment": {name: facts[name] for name in ENVIRONMENT if name in facts},
             "seconds": round(seconds(run), 1), "step": [report["step"] for report in run.reports],
             "reports": {tag: [_short(value, DIGITS.get(tag, 5)) for value in values]
                         for tag, values in columns.items() if any(value is not None for value in values)}}
    if baseline := run.described("stats/baseline.json"):
        entry["baseline"] = baseline
    if columns["credal/truth"][-1] is not None:
        found = run.arrays("pseudo_labels", ("class", "alpha", "labels"))
        entry["pseudo_labels"] = {name: [_short(float(value)) if name == "alpha" else int(value) for value in values]
                                  for name, values in found.items()}
    return entry


def _begun(environment: dict) -> float:
    return time.mktime(time.strptime(environment["started"], "%Y-%m-%d %H:%M:%S"))


def seconds(run: Run) -> float:
    """Returns the time from the start of a run's last process to its last report."""
    return run.report_file.stat().st_mtime - _begun(run.described("args/environment.json"))


def _path(entry: dict) -> str:
    """The path of an entry's run below a root: it tells where weights and images lie, so it is another here."""
    config = RunConfig.from_json(cssl.method(entry["config"]["method"]), {**entry["config"], "train_dir": "."})
    return Path(Path(entry["path"]).parts[0], config.folder()).as_posix()


def _read(file: Path) -> dict[str, dict]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {_path(entry): entry for entry in map(json.loads, lines)}


def save(runs: Iterable[Run], root: Path, file: Path) -> None:
    """Adds runs below `root` to a record; those that it has already stay as they are."""
    entries = _read(file)
    for run in runs:
        path = run.path.relative_to(root.absolute()).as_posix()
        if path not in entries:
            entries[path] = {"path": path, **_entry(run)}
    write_text(file, "".join(json.dumps(entries[path], separators=(",", ":")) + "\n" for path in sorted(entries)))


def restore(file: Path, root: Path) -> None:
    """Writes run folders below `root` for the entries of a record that have none there."""
    for path, entry in _read(file).items():
        folder = Run(root / path)
        if folder.args.exists():
            continue
        write_text(folder.args, json.dumps(entry["config"], indent=1))
        write_text(folder.environment_file, json.dumps(entry["environment"], indent=1))
        if "baseline" in entry:
            write_text(folder.stats / "baseline.json", json.dumps(entry["baseline"]))
        reports = []
        for number, step in enumerate(entry["step"]):
            report = {tag: values[number] for tag, values in entry["reports"].items() if values[number] is not None}
            credal = {name: report.pop(f"credal/{name}") for name in CREDAL if f"credal/{name}" in report}
            reports.append(json.dumps({"step": step, **report, **({"credal": credal} if credal else {})}))
        write_text(folder.report_file, "\n".join(reports) + "\n")
        if "pseudo_labels" in entry:
            folder.write_arrays("pseudo_labels", **entry["pseudo_labels"])
        ended = _begun(entry["environment"]) + entry["seconds"]
        os.utime(folder.report_file, (ended, ended))  # so that `seconds` says the same
