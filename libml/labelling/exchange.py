"""Labels from elsewhere and for elsewhere: trees with a folder for each class, and Label Studio's JSON."""
from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, quote, unquote, urlsplit

from libml.data import files
from libml.errors import UserError
from libml.labelling.learner import Round
from libml.labelling.session import Session, checked_class
from libml.writing import write_text, writing


def read(session: Session, source: Path) -> int:
    """Takes labels from a tree <class>/** of the same files, or from Label Studio's JSON; returns how many are new.
    What has a label here keeps it."""
    found = _from_tree(session, source) if source.is_dir() else _from_json(session, source)
    with session.changed:
        known = session.all()
        by_class = defaultdict[str, list[int]](list)
        for n, label in found.items():
            if n not in known:
                by_class[checked_class(label)].append(n)
        for label, numbers in by_class.items():
            session.add_class(label)
            session.label(numbers, label, "read")
    return sum(map(len, by_class.values()))


def _from_tree(session: Session, folder: Path) -> dict[int, str]:
    """The class of each image is the name of its folder right below `folder`, where the images themselves are, or
    copies of the same names."""
    at = {session.path(n).resolve(): n for n in range(len(session.names))}
    by_name = defaultdict[str, list[int]](list)
    for n, name in enumerate(session.names):
        for copy in {PurePosixPath(name).name, _flat(name)}:
            by_name[copy].append(n)
    found: dict[int, str] = {}
    for path in files.image_files(folder)[0]:
        label, *inner = path.relative_to(folder).parts
        here = path.resolve()
        numbers = [at[here]] if here in at else by_name[path.name]
        if inner and len(numbers) == 1 and found.setdefault(numbers[0], label) != label:
            n = numbers[0]
            raise UserError(f"{session.names[n]} is of class {found[n]!r} and of class {label!r} in {folder}. Leave it "
                            "in one of them.")
    if not found:
        raise UserError(f"{folder} has no folder <class> with images of {session.folder}.")
    return found


def _from_json(session: Session, file: Path) -> dict[int, str]:
    """The last choice of each task that was not cancelled; an image is found by the end of its address."""
    try:
        tasks = json.loads(file.read_text(encoding="utf-8"))
        by_name = defaultdict[str, list[int]](list)
        for n, name in enumerate(session.names):
            parts = PurePosixPath(name).parts
            for start in range(len(parts)):
                by_name["/".join(parts[start:])].append(n)
        found: dict[int, str] = {}
        for task in tasks:
            chosen = [choice for annotation in task.get("annotations") or [] if not annotation.get("was_cancelled")
                      for result in annotation["result"] if result["type"] == "choices"
                      for choice in result["value"]["choices"]]
            numbers = _numbers(by_name, task["data"])
            if chosen and len(numbers) == 1:
                found[numbers[0]] = str(chosen[-1])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read as Label Studio's JSON ({type(error).__name__}: {error}). Expected a "
                        "list of tasks, as its export in the format JSON is, or a folder with one folder for each "
                        "class.") from error
    if not found:
        raise UserError(f"{file} has no label for an image of {session.folder}: its images are known by the ends of "
                        "their addresses.")
    return found


def _numbers(by_name: dict[str, list[int]], data: dict) -> list[int]:
    """Which images a task may mean: by its longest end that names any."""
    for value in data.values():
        if isinstance(value, str):
            address = urlsplit(value)
            path = parse_qs(address.query).get("d", [unquote(address.path)])[0]
            parts = [part for part in path.split("/") if part]
            for start in range(len(parts)):
                if numbers := by_name.get("/".join(parts[start:]), []):
                    return numbers
    return []


def write(session: Session, target: Path, now: Round | None = None) -> int:
    """Writes labels as Label Studio's JSON, with a model's predictions of the other images in their order, for a name
    that ends in .json, else as a new folder of copies <class>/<name>; returns how many labels."""
    known = {n: decision for n, decision in session.all().items() if decision.label}
    if target.suffix.lower() == ".json":
        if target.exists():
            raise UserError(f"{target} is there already, and would be overwritten. Name another file.")
        ranked = {n: place for place, n in enumerate(now.ranking if now else [])}
        rest = sorted((n for n in range(len(session.names)) if session.open(n)),
                      key=lambda n: (ranked.get(n, len(ranked)), n))
        tasks = [_task(session.names[n], known[n].label, None) for n in known]
        tasks += [_task(session.names[n], None, now.guess(n) if now and not session.random[n] else None) for n in rest]
        write_text(target, json.dumps(tasks, indent=1, ensure_ascii=False))
        return len(known)
    if target.exists():
        raise UserError(f"{target} is there already. Name a folder that is to be made.")
    copies = dict[Path, int]()
    for n, decision in known.items():
        if decision.label.startswith(".") or "/" in decision.label or os.sep in decision.label:
            raise UserError(f"The class {decision.label!r} cannot be the name of a folder. Rename it.")
        other = copies.setdefault(target / decision.label / _flat(session.names[n]), n)
        if other != n:
            raise UserError(f"{session.names[other]} and {session.names[n]} would have the same name in {target}. "
                            "Rename one of them.")
    for to, n in copies.items():
        with writing(to):
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(session.path(n), to)
    return len(known)


def _flat(name: str) -> str:
    return name.replace("/", "_")


def _task(name: str, label: str | None, guess: tuple[str, float] | None) -> dict:
    def chosen(text: str) -> list[dict]:
        return [{"from_name": "choice", "to_name": "image", "type": "choices", "value": {"choices": [text]}}]

    task: dict = {"data": {"image": f"/data/local-files/?d={quote(name)}"}}
    if label is not None:
        task["annotations"] = [{"result": chosen(label)}]
    if guess:
        task["predictions"] = [{"model_version": "cssl", "score": round(guess[1], 4), "result": chosen(guess[0])}]
    return task
