"""The one training loop: many steps per call, reports, checkpoints, a clean stop, an exact continuation."""
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from libml import calibration, results
from libml.augment import OPS, to_float
from libml.data import SSLData, batches
from libml.distribute import Council
from libml.errors import UserError
from libml.options import option
from libml.ssl import SSLModel

CHECKPOINT = "model.ckpt"
CAPACITY = 64  # scalars a step may return, and one more that counts the steps
PSEUDO_LABEL_SAMPLE = 512  # unlabelled images whose pseudo-labels are kept for the report page


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How long to train and when to report; kimg = 1024 labelled images."""

    train_kimg: float = option(65536.0, "K: length in kimg (65536 kimg = 2^20 updates of 64)")
    schedule_kimg: float = option(0.0, "horizon of the learning rate's cosine in kimg; 0: the length of the run")
    report_kimg: float = option(64.0, "evaluate and log every so many kimg")
    save_kimg: float = option(64.0, "save every so many kimg, on the grid of the reports")
    keep_ckpt: int = option(50, "how many checkpoints to keep")
    seed: int = option(0, "of initial weights, batches and augmentation (the split has its own, in the dataset's name)")

    def updates(self, batch: int) -> int:
        """The number of updates."""
        return -int(-self.train_kimg * 1024 // batch)

    def report_updates(self, batch: int) -> int:
        """Updates between reports."""
        return max(1, round(self.report_kimg * 1024 / batch))

    @property
    def total_images(self) -> float:
        """The schedule's horizon in labelled images."""
        return (self.schedule_kimg or self.train_kimg) * 1024


class Diverged(UserError):
    """The loss is no longer a number."""


class Interrupted(Exception):
    """A signal asked the run to stop; it has saved its state."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying of the first; a second one ends the program at once."""
    received: list[int] = []

    def remember(signum, frame):
        if received:
            sys.exit(128 + signum)
        received.append(signum)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Evaluator:
    """Class probabilities of the averaged and the raw model for arrays of images, spread over all replicas."""

    def __init__(self, model: SSLModel, strategy: tf.distribute.Strategy, batch: int = 256):
        self.strategy, self.batch = strategy, batch
        replicas = strategy.num_replicas_in_sync

        def predict(chunk: tf.Tensor) -> tf.Tensor:
            # Every replica gets the whole chunk and takes its rows: no input pipeline to set up for a few batches.
            context = tf.distribute.get_replica_context()
            mine = to_float(chunk[context.replica_id_in_sync_group * batch:][:batch])
            both = tf.stack([tf.nn.softmax(model.infer(mine, ema=ema)) for ema in (True, False)], 1)
            return context.all_gather(both, 0) if replicas > 1 else both

        @tf.function
        def run(chunk):
            return strategy.experimental_local_results(strategy.run(predict, args=(chunk,)))[0]

        self._run = run

    def __call__(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the probabilities [N, classes] of the averaged and of the raw model."""
        size = self.batch * self.strategy.num_replicas_in_sync
        chunks = []
        for start in range(0, len(images), size):
            chunk = np.asarray(images[start:start + size])
            padded = np.concatenate([chunk, np.zeros((size - len(chunk), *chunk.shape[1:]), np.uint8)])
            chunks.append(self._run(tf.constant(padded)).numpy()[:len(chunk)])
        both = np.concatenate(chunks)
        return both[:, 0], both[:, 1]


def evaluate(evaluator: Evaluator, data: SSLData, extra: np.ndarray | None = None,
             ) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Evaluates both models on all parts of the data, in one pass.

    Returns:
        Accuracy (percent) and ECE by tag; the averaged model's probabilities on the test set and on `extra` images.
    """
    parts = data.parts()
    arrays = [images for images, _ in parts.values()] + ([] if extra is None else [extra])
    ends = np.cumsum([len(array) for array in arrays])[:-1]
    both = [np.split(p, ends) for p in evaluator(np.concatenate(arrays))]
    scores: dict[str, float] = {}
    for i, (part, (_, labels)) in enumerate(parts.items()):
        for prefix, probabilities in zip(("", "/raw"), both, strict=True):
            suffix = prefix + ("" if part == "test" else f"/{part}")
            scores[f"accuracy{suffix}"] = 100 * calibration.accuracy(probabilities[i], labels)
            scores[f"ece{suffix}"] = calibration.expected_calibration_error(probabilities[i], labels)
    return scores, both[0][list(parts).index("test")], both[0][-1]


def checkpoint_of(model: SSLModel, **extra) -> tf.train.Checkpoint:
    """Returns a checkpoint object over everything in the model."""
    return tf.train.Checkpoint(**model.checkpoint_items(), **extra)


def restore_newest(checkpoint: tf.train.Checkpoint, paths: list[str], say: Callable[[str], None]) -> str | None:
    """Restores the newest checkpoint that can be read, warning about damaged ones; None if there is none."""
    for path in reversed(paths):
        try:
            checkpoint.restore(path).assert_consumed()
            return path
        except Exception as error:  # TensorFlow's reader raises a different type for every kind of damage
            reason = str(error).strip().splitlines()[0][:150]
            say(f"warning: checkpoint {path} is damaged ({reason}); trying the one before.")
    if paths:
        raise UserError(f"None of the {len(paths)} checkpoints in {Path(paths[0]).parent} can be read. Move the run's "
                        "whole folder away to start anew.")
    return None


class Trainer:
    """Runs a model to the end of its schedule, from wherever its folder left off.

    Args:
        model: created under `strategy.scope()`.
        data: what to train on.
        options: length and grid.
        folder: the run's folder.
        strategy: where to run.
        is_chief: whether this process writes files and talks.
    """

    def __init__(self, model: SSLModel, data: SSLData, options: TrainOptions, folder: Path,
                 strategy: tf.distribute.Strategy, is_chief: bool = True):
        self.model, self.data, self.options, self.folder = model, data, options, folder
        self.strategy, self.is_chief = strategy, is_chief
        self.batch = model.options.batch
        self.uratio = model.options.uratio if model.uses_unlabeled else 0
        self.total_updates = options.updates(self.batch)
        self.report_updates = options.report_updates(self.batch)
        self.scalar_names: list[str] = []
        self.totals = tf.Variable(tf.zeros([CAPACITY + 1], tf.float64), trainable=False)  # sums since the last report
        self.evaluator = Evaluator(model, strategy)
        self.council = Council(strategy)
        self.checkpoint = checkpoint_of(model, totals=self.totals)
        self.metrics_file = folder / "metrics.jsonl"
        self.writer = None
        self._bar = None
        for part in ("tf", "stats") if is_chief else ():
            (folder / part).mkdir(parents=True, exist_ok=True)
        self.manager = tf.train.CheckpointManager(self.checkpoint, str(folder / "tf"), max_to_keep=options.keep_ckpt,
                                                  checkpoint_name=CHECKPOINT)

    def say(self, text: str) -> None:
        """Writes a line to the terminal, without tearing the progress bar, and to the log file."""
        if not self.is_chief:
            return
        with tqdm.external_write_mode():
            print(text, flush=True)
        with (self.folder / "train.log").open("a") as log:
            log.write(text + "\n")

    def restore(self) -> int:
        """Continues from the newest readable checkpoint; returns the number of updates done."""
        path = None
        with self.council.together():
            if self.is_chief:
                path = restore_newest(self.checkpoint, list(self.manager.checkpoints), self.say)
                if path is None:
                    self._check_nothing_is_lost()
        updates = int(self.council.hear(self.model.updates.numpy())[0, 0])  # all continue where the chief does
        with self.council.together():
            if updates and not self.is_chief:
                path = str(self.folder / "tf" / f"{CHECKPOINT}-{updates * self.batch}")
                if not Path(path + ".index").exists():
                    raise UserError(f"Worker {self.council.index} does not find {path}, where the chief continues: "
                                    "--train_dir must be a folder that all machines share.")
                restore_newest(self.checkpoint, [path], self.say)
        if self.is_chief:
            self._forget_after(updates * self.batch)
        if path:
            self.say(f"Continuing from {path}: {updates} of {self.total_updates} updates done.")
        return updates

    def _check_nothing_is_lost(self) -> None:
        """Without a checkpoint a run starts anew, and its reports with it: not if there must have been one.

        A killed run may have reported where its first checkpoint was due, but nothing after that.
        """
        reports = results.read_run(self.folder).metrics
        if reports and reports[-1]["step"] > self._save_updates() * self.batch:
            kimg = reports[-1]["step"] / 1024
            raise UserError(f"{self.folder} has reports up to {kimg:g} kimg, but no checkpoint in its folder tf. Bring "
                            "that back to continue, or move the whole run folder away to start anew.")

    def _forget_after(self, images: int) -> None:
        """Drops reports later than the checkpoint (they will come again) and rewrites the event file to match."""
        reports = [report for report in results.read_run(self.folder).metrics if report["step"] <= images]
        text = "".join(json.dumps(report) + "\n" for report in reports)
        results.write_text(self.metrics_file, text)
        stale = list((self.folder / "tf").glob("events.out.tfevents.*"))
        self.writer = tf.summary.create_file_writer(str(self.folder / "tf"))
        for report in reports:
            self._summarize(report)
        self.writer.flush()
        for file in stale:
            file.unlink()

    def _summarize(self, report: dict) -> None:
        with self.writer.as_default():
            for tag, value in report.items():
                if isinstance(value, int | float) and tag != "step":
                    tf.summary.scalar(tag, value, step=report["step"])

    def _step_function(self) -> Callable:
        model, strategy = self.model, self.strategy

        def step(batch):
            scalars = model.train_step(batch)
            self.scalar_names[:] = sorted(scalars)
            values = tf.stack([*(tf.cast(scalars[name], tf.float64) for name in self.scalar_names),
                               tf.ones([], tf.float64)])
            return tf.pad(values, [[CAPACITY - len(self.scalar_names), 0]])  # the count is the last

        @tf.function
        def run(iterator, count):
            """Runs `count` updates, or fewer if the loss stops being a number; returns the last step's scalars."""
            done, last = tf.zeros([], tf.int64), tf.zeros([CAPACITY + 1], tf.float64)
            while done < count and tf.reduce_all(tf.math.is_finite(last)):
                values = strategy.run(step, args=(next(iterator),))
                last = strategy.experimental_local_results(values)[0]  # equal on all replicas
                self.totals.assign_add(last)
                done += 1
            return last

        return run

    def _try_jit(self, updates: int) -> None:
        """Compiles the step before anything depends on it; goes on without XLA if it cannot."""
        run = tf.function(lambda batch: self.strategy.run(self.model.trial_loss, args=(batch,)))
        try:
            run(next(self._batches(updates)))
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError) as error:
            reason = next((line for line in error.message.splitlines() if "nsupported" in line or "XLA" in line),
                          error.message.splitlines()[0])
            self.say(f"warning: XLA cannot compile this step ({reason.strip()[:300]}); continuing without --jit.")
            self.model.jit = False

    def _batches(self, start: int):
        def make(context: tf.distribute.InputContext):
            local = self.strategy.num_replicas_in_sync // context.num_input_pipelines
            return batches(self.data, batch=self.batch, uratio=self.uratio, seed=self.options.seed, start_step=start,
                           num_shards=self.strategy.num_replicas_in_sync,
                           first_shard=context.input_pipeline_id * local, local_shards=local)

        return iter(self.strategy.distribute_datasets_from_function(make))

    def run(self) -> dict:
        """Trains to the end; returns the medians of the last reports. Raises Interrupted after a signal."""
        updates = self.restore()
        if updates < self.total_updates:
            with _signals() as signals:
                self._train(updates, signals)
            self.council.part()  # nobody leaves before the chief has written the last checkpoint
        else:
            self.say(f"This run is finished: {updates} updates were done before.")
        if not self.is_chief:
            return {}
        reports = results.read_run(self.folder).metrics
        return {name: results.medians([report[name] for report in reports]) for name in ("accuracy", "ece")}

    def _train(self, updates: int, signals: list[int]) -> None:
        if self.model.jit:
            self._try_jit(updates)
        iterator, run = self._batches(updates), self._step_function()
        per_update = self.batch * (1 + self.uratio)
        chunk, busy, seen = 1, 0.0, 0
        first, started = updates, time.perf_counter()
        with tqdm(total=self.total_updates, initial=updates, unit="step", disable=None if self.is_chief else True,
                  dynamic_ncols=True) as self._bar:
            while updates < self.total_updates:
                boundary = min(self.total_updates, (updates // self.report_updates + 1) * self.report_updates)
                count = min(chunk, boundary - updates)
                clock = time.perf_counter()
                last = run(iterator, tf.constant(count, tf.int64)).numpy()
                spent = time.perf_counter() - clock
                if not np.isfinite(last).all():
                    self._diverged(last)
                updates += count
                if updates - count > first:  # the first call also compiles
                    busy, seen = busy + spent, seen + count
                    chunk = max(1, min(2 * chunk, int(chunk_seconds(count, spent))))
                self._progress(count, updates, busy, seen, per_update)
                if updates == boundary:
                    rate = seen * per_update / busy if seen else per_update * count / spent
                    self._report(updates, rate, started, first)
                    busy, seen = 0.0, 0
                    self._save_on_grid(updates)
                # Clocks and signals differ between processes, but all must stop, or go on, by the same updates.
                said = self.council.hear(chunk, signals[0] if signals else 0)
                chunk, stop = int(said[:, 0].min()), int(said[:, 1].max())
                if stop:
                    self.save(updates)
                    self.say(f"Stopped by {signal.Signals(stop).name} after {updates} updates; state saved in "
                             f"{self.folder / 'tf'}. The same command continues.")
                    self.council.part()
                    raise Interrupted(stop)
        self._bar = None

    def _progress(self, count: int, updates: int, busy: float, seen: int, per_update: int) -> None:
        if self._bar.disable:
            return
        self._bar.update(count)
        shown = {name.split("/")[1]: f"{value:.4g}" for name, value in self._means().items()
                 if name in ("losses/xe", "losses/xeu", "monitors/mask")}
        if seen:
            shown["img/s"] = f"{seen * per_update / busy:.0f}"
        pool, ratio = (self.data.unlabeled, self.uratio) if self.uratio else (self.data.labeled, 1)
        epoch = updates * self.batch * ratio / len(pool)
        self._bar.set_postfix({"epoch": f"{epoch:.1f}", **shown})

    def _means(self) -> dict[str, float]:
        """The logged scalars, averaged over the updates since the last report."""
        *sums, count = self.totals.numpy()[-len(self.scalar_names) - 1:]
        return {name: float(total / count) for name, total in zip(self.scalar_names, sums, strict=True)}

    def _report(self, updates: int, rate: float, started: float, first: int) -> None:
        scalars = self._means()
        self.totals.assign(tf.zeros_like(self.totals))
        for name in ("known", "used"):  # quotients of sums, not sums of quotients
            all_, right = (scalars.pop(f"monitors/pseudo_{name}{part}", 0.0) for part in ("", "_correct"))
            if all_:
                scalars["monitors/pseudo_accuracy" + ("_masked" if name == "used" else "")] = right / all_
        sample = self.data.unlabeled[:PSEUDO_LABEL_SAMPLE]
        images = np.asarray(self.data.images[sample])
        scores, test, guesses = evaluate(self.evaluator, self.data, images)
        if not self.is_chief:
            return
        pseudo = {"images": images, "probabilities": guesses, "labels": self.data.labels[sample],
                  "class_names": np.array(self.data.class_names)}
        distribution = np.bincount(test.argmax(1), minlength=self.data.num_classes) / len(test)
        report = {"step": updates * self.batch, **scores, **scalars, "images_per_s": round(rate, 1),
                  "class_distribution": [round(float(share), 6) for share in distribution]}
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(report) + "\n")
        self._summarize(report)
        self.writer.flush()
        self._write_stats(test, pseudo, updates)
        left = (self.total_updates - updates) * (time.perf_counter() - started) / (updates - first)
        self.say(f"{updates * self.batch / 1024:10.1f} kimg  accuracy {scores['accuracy']:6.2f}  "
                 f"(raw {scores['accuracy/raw']:6.2f})  ece {scores['ece']:.4f}  xe {scalars['losses/xe']:.4f}  "
                 f"{rate:8.0f} images/s  time left {format_seconds(left)}")

    def _write_stats(self, test: np.ndarray, pseudo: dict, updates: int) -> None:
        stats = self.folder / "stats"
        save_arrays(stats / "predictions.npz", probabilities=test, labels=self.data.test_labels,
                    step=updates * self.batch)
        save_arrays(stats / "pseudo_labels.npz", **pseudo)
        if self.model.augmenter is not None and self.model.augmenter.uses_probe:
            temporary = stats / ".rates.npy"
            np.save(temporary, self.model.augmenter.rates.numpy())
            os.replace(temporary, stats / "rates.npy")
            names = {"ops": list(OPS), "bins": [list(op.bins) for op in OPS.values()]}
            results.write_text(stats / "rates.json", json.dumps(names))

    def _save_on_grid(self, updates: int) -> None:
        if updates % self._save_updates() == 0 or updates == self.total_updates:
            self.save(updates)

    def _save_updates(self) -> int:
        """Updates between checkpoints."""
        return max(1, round(self.options.save_kimg * 1024 / self.batch / self.report_updates)) * self.report_updates

    def save(self, updates: int) -> None:
        """Writes a checkpoint; TensorFlow makes it visible only when it is complete."""
        if self.is_chief:
            self.manager.save(checkpoint_number=updates * self.batch)

    def _diverged(self, last: np.ndarray) -> None:
        values = zip(self.scalar_names, last[-len(self.scalar_names) - 1:-1], strict=True)
        parts = ", ".join(f"{name} = {value:g}" for name, value in values if "losses" in name)
        good = self.manager.latest_checkpoint or "none yet"
        raise Diverged(f"The loss is no longer a number at update {int(self.model.updates.numpy())}: {parts}. Last "
                       f"good checkpoint: {good}. Try a smaller --lr, or --mixed_precision=off if it was on.")


def chunk_seconds(count: int, spent: float, target: float = 1.0) -> float:
    """Steps that take about `target` seconds: long enough to keep Python out, short enough to react to a signal."""
    return target * count / max(spent, 1e-6)


def save_arrays(path: Path, **arrays) -> None:
    """Writes an npz file in one step."""
    temporary = path.with_name(f".{path.name}")
    np.savez_compressed(temporary, **arrays)
    os.replace(temporary, path)


def format_seconds(seconds: float) -> str:
    """Formats a duration as d:hh:mm:ss without leading zeros parts."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}:{minutes:02}:{seconds:02}" if days else f"{hours}:{minutes:02}:{seconds:02}"
