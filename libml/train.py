"""The one training loop: many steps per call, reports, checkpoints, a clean stop, an exact continuation."""
from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tqdm import tqdm

from libml.augment.augmenter import to_float
from libml.augment.ops import OPS
from libml.data import SSLData, batches
from libml.devices.distribute import ProcessGroup
from libml.errors import UserError
from libml.learn.model import SSLModel
from libml.learn.update import pseudo_label_accuracy
from libml.randomness import HOST
from libml.results.evaluate import Evaluator, credal_coverage, evaluate_all
from libml.run import Run

CAPACITY = 64  # scalars a step may return, and one more that counts the steps
PSEUDO_LABEL_SAMPLE = 512  # unlabelled images, at most, whose pseudo-labels are kept for the report page
FOLLOWED = 12  # of them, those whose credal sets are in every report
TEST_SAMPLE = 24  # test images kept for the report page, of each kind
EVENTS = ".cssl.v2"  # how our event files end: a user may write others beside them
CHUNK_SECONDS = 1.0  # between looks at signals: long enough to keep Python out, short enough to react

Hook: TypeAlias = "Callable[[Trainer, dict], None] | keras.callbacks.Callback"


class Interrupted(Exception):
    """A signal, whose number it has, asked the run to stop, which has saved its state."""


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying of the first; a second one ends the program at once."""
    received: list[int] = []

    def remember(signum, frame):
        if received:
            sys.exit(128 + signum)
        received.append(signum)

    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody listen
        yield received
        return
    previous = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Trainer:
    """Trains a run, whose model was made under `strategy.scope()`, to the end, from wherever its folder left off."""

    def __init__(self, run: Run, strategy: tf.distribute.Strategy, hooks: Sequence[Hook] = (),
                 group: ProcessGroup | None = None):
        self.run, self.strategy, self.group = run, strategy, group or ProcessGroup(strategy)
        self.is_chief = self.group.rank == 0
        self.data, self.model, self.config = run.data, run.model, run.config
        self.batch = self.model.options.batch
        self.uratio = self.model.options.uratio if self.model.uses_unlabeled else 0
        self.updates, self.total_updates, self.report_updates = 0, self.config.updates, self.config.report_updates
        callbacks = [hook for hook in hooks if isinstance(hook, keras.callbacks.Callback)]
        self.hooks = [hook for hook in hooks if hook not in callbacks]
        self.callbacks = keras.callbacks.CallbackList(callbacks, model=self.model)
        self.scalar_names: list[str] = []
        self.totals = tf.Variable(tf.zeros([CAPACITY + 1], tf.float64), trainable=False)  # sums since the last report
        self.evaluator = Evaluator(self.model, strategy)
        self.checkpoint = tf.train.Checkpoint(**self.model.checkpoint_items(), totals=self.totals)

    def log(self, text: str) -> None:
        """Writes a line to the terminal, without tearing the progress bar, and to the log file."""
        if not self.is_chief:
            return
        try:
            with tqdm.external_write_mode():
                print(text, flush=True)
        except OSError:  # the reader is gone; that does not end training, nor shall the end of the program complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self.run.log(text)

    def restore(self) -> int:
        """Continues from the newest readable checkpoint; returns the number of updates done."""
        path = None
        with self.group.errors_stop_all():
            if self.is_chief:
                if lost := self.run.lost_checkpoint():
                    self.log(f"warning: {lost}.")
                path = self._restore_newest(self.run.checkpoints())
        updates = int(self.group.all_gather(self.model.updates.numpy())[0, 0])  # all continue where the chief does
        with self.group.errors_stop_all():
            if updates and not self.is_chief:
                path = self.run.checkpoint_at(updates * self.batch)
                if not Path(path + ".index").exists():
                    raise UserError(f"Worker {self.group.rank} does not find {path}, where the chief continues: "
                                    "--train_dir must be a folder that all machines share.")
                self._restore_newest([path])
            if self.is_chief:  # later reports will come again
                reports = self.run.drop_reports(updates * self.batch)
                stale = list(self.run.checkpoint_dir.glob(f"events.out.tfevents.*{EVENTS}"))
                with self._whole_or_error("event file"):
                    self._writer = tf.summary.create_file_writer(str(self.run.checkpoint_dir), filename_suffix=EVENTS)
                self._write_events(reports)
                for file in stale:
                    file.unlink(missing_ok=True)
        if path:
            self.log(f"Continuing from {path}: {updates} of {self.total_updates} updates done.")
        return updates

    def _restore_newest(self, paths: list[str]) -> str | None:
        """Restores the newest checkpoint that can be read, and sets damaged ones aside; None where a run begins."""
        for number, path in reversed([*enumerate(paths)]):
            try:
                self.checkpoint.restore(path).assert_consumed()
            except Exception as error:  # TensorFlow's reader raises a different type for every kind of damage
                reason = str(error).strip().splitlines()[0][:150]
                self.log(f"warning: checkpoint {path} is damaged ({reason}); trying the one before.")
            else:
                self.run.set_aside(paths[number + 1:])
                return path
        if paths:
            raise UserError(f"None of the {len(paths)} checkpoints in {Path(paths[0]).parent} can be read. Move the "
                            "run's whole folder away to start a new run.")
        reports = self.run.reports  # a killed run may have one where its first checkpoint was due, but none after that
        if reports and reports[-1]["step"] > self.config.save_updates * self.batch:
            kimg = reports[-1]["step"] / 1024
            raise UserError(f"{self.run.path} has reports up to {kimg:g} kimg, but no checkpoint in its folder tf. "
                            "Bring that back to continue, or move the whole run folder away to start a new run.")
        return None

    def _write_events(self, reports: list[dict]) -> None:
        # All at once, as tf.summary.scalar takes a millisecond for each: messages one after the other are one message.
        with self._whole_or_error("event file"), self._writer.as_default():
            for report in reports:
                summary = b"".join(scalar_pb(tag, value).SerializeToString() for tag, value in report.items()
                                   if isinstance(value, int | float) and tag != "step")
                tf.summary.experimental.write_raw_pb(summary, step=report["step"])
            self._writer.flush()

    def _try_jit(self, updates: int) -> None:
        """Compiles the step before anything depends on it; goes on without XLA if it cannot."""
        run = tf.function(lambda batch: self.strategy.run(self.model.trial_loss, args=(batch,)), autograph=False)
        try:
            run(next(distributed_batches(self.model, self.data, self.strategy, updates)))
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError) as error:
            reason = next((line for line in error.message.splitlines() if "nsupported" in line or "XLA" in line),
                          error.message.splitlines()[0])
            self.log(f"warning: XLA cannot compile this step ({reason.strip()[:300]}); continuing without --jit.")
            self.model.jit = False

    def _compile_views(self) -> None:
        """Has XLA compile the views while this thread traces the step; beside nothing else that is compiled."""
        spec = self.data.dataset(self.model).element_spec
        nothing = {name: tf.zeros(part.shape, part.dtype) for name, part in spec.items()}
        views = tf.function(lambda batch: self.strategy.run(self.model.make_views, args=(batch,)),
                            autograph=False).get_concrete_function(spec)

        def compile_views():
            with suppress(tf.errors.OpError):  # training meets it again, and says so
                views(nothing)

        thread = threading.Thread(target=compile_views)
        thread.start()
        if self.model.jit:
            thread.join()

    def train(self) -> None:
        """Trains to the end, or until a callback stops it. Raises Interrupted after a signal."""
        if (self.model.augmenter.jit_compile and self.strategy.num_replicas_in_sync == 1
                and not self.run.fulfils(self.config)):
            self._compile_views()
        self.updates = self.restore()
        if self.updates < self.total_updates:
            with _signals() as signals:
                self.model.stop_training = False  # as Keras's callbacks expect it
                self.callbacks.on_train_begin()
                self._train(signals)
                self.callbacks.on_train_end()
            self.group.final_barrier()  # nobody leaves before the chief has written the last checkpoint
        else:
            self.log(f"This run is finished: {self.updates} updates were done before.")

    def _train(self, signals: list[int]) -> None:
        if self.model.jit:
            self._try_jit(self.updates)
        iterator = distributed_batches(self.model, self.data, self.strategy, self.updates)
        run = update_loop(self.model, self.strategy, self.totals, self.scalar_names)
        clock = _Clock(self.batch * (1 + self.uratio))
        chunk = 1
        with tqdm(total=self.total_updates, initial=self.updates, unit="step", dynamic_ncols=True,
                  disable=None if self.is_chief else True) as bar:
            while self.updates < self.total_updates:
                if self.updates % self.report_updates == 0:
                    self.callbacks.on_epoch_begin(self.updates // self.report_updates)
                boundary = min(self.total_updates, (self.updates // self.report_updates + 1) * self.report_updates)
                count = min(chunk, boundary - self.updates)
                started = time.perf_counter()
                with self.group.expected("an update" if clock.started else "the first update", count):
                    last = run(iterator, tf.constant(count)).numpy()
                if not np.isfinite(last).all():
                    self._diverged(last)
                self.updates += count
                seconds = time.perf_counter() - started
                chunk = clock.add(count, seconds, chunk)
                if not bar.disable:
                    shown = {name.split("/")[1]: value for name, value in self._means().items()
                             if name in ("losses/xe", "losses/xeu", "monitors/mask")}
                    with suppress(OSError):
                        bar.update(count)
                        bar.set_postfix({**shown, "img/s": round(count * clock.images_per_update / seconds)})
                if self.updates == boundary:
                    self._report(clock)
                    if self._saves_here():
                        self.save()
                # Clocks and signals differ between processes, but all must stop, or go on, by the same updates.
                heard = self.group.all_gather(chunk, signals[0] if signals else 0, self.model.stop_training)
                chunk, signum = int(heard[:, 0].min()), int(heard[:, 1].max())
                if signum:
                    self.save()
                    self.log(f"Stopped by {signal.Signals(signum).name} after {self.updates} updates; state saved in "
                             f"{self.run.checkpoint_dir}. The same command continues.")
                    self.group.final_barrier()
                    raise Interrupted(signum)
                if heard[:, 2].any():
                    self.save()
                    self.log(f"Stopped by a callback after {self.updates} of {self.total_updates} updates.")
                    break

    def _saves_here(self) -> bool:
        return self.updates % self.config.save_updates == 0 or self.updates == self.total_updates

    def _means(self) -> dict[str, float]:
        """The logged scalars, averaged over the updates since the last report."""
        *sums, count = self.totals.numpy()[-len(self.scalar_names) - 1:]
        return {name: float(total / count) for name, total in zip(self.scalar_names, sums, strict=True)}

    def _report(self, clock: _Clock) -> None:
        scalars = pseudo_label_accuracy(self._means())
        self.totals.assign(tf.zeros_like(self.totals))
        sample = self.data.unlabeled[:min(PSEUDO_LABEL_SAMPLE, len(self.data.test_labels))]  # most of it is the test
        images = np.asarray(self.data.plain[sample])
        with self.group.expected("an evaluation"):
            scores, test = evaluate_all(self.evaluator, self.data)
            guesses = self.evaluator(images)[0]
        distribution = np.bincount(test.argmax(1), minlength=self.data.num_classes) / len(test)
        rate, left = clock.report(self.total_updates - self.updates)
        report = {"step": self.updates * self.batch, **scores, "images_per_s": round(rate, 1),
                  "class_distribution": [round(float(share), 6) for share in distribution]}
        if clash := {*report, "credal"} & scalars.keys():
            raise UserError(f"{type(self.model).__name__} logs {', '.join(sorted(clash))}, as reports call what they "
                            "measure themselves. Give its scalars other names, such as monitors/NAME.")
        report |= scalars
        credal = {name: values.numpy() for name, values in self.model.credal_sets(to_float(images), guesses).items()}
        if "alpha" in credal:
            alpha = [round(float(size), 5) for size in credal["alpha"]]
            covered = credal_coverage(credal["class"], credal["alpha"], self.data.labels[sample])
            report["credal"] = {"class": credal["class"][:FOLLOWED].tolist(), "alpha": alpha[:FOLLOWED],
                                "deciles": np.quantile(alpha, np.arange(11) / 10).round(5).tolist(),
                                **{name: round(share, 5) for name, share in covered.items()}}
        with self.group.errors_stop_all():
            if self.is_chief:
                self.run.add_report(report)
                self._write_events([report])
                if self._saves_here() or not (self.run.stats / "predictions.npz").exists():
                    self._write_arrays(test, {"images": self.data.shown(sample), "probabilities": guesses,
                                              "labels": self.data.labels[sample], **credal,
                                              "class_names": np.array(self.data.class_names)})
                loss = "losses/xe" if "losses/xe" in scalars else "losses/total"
                self.log(f"{self.updates * self.batch / 1024:10.1f} kimg  accuracy {scores['accuracy']:6.2f}  "
                         f"(raw {scores['accuracy/raw']:6.2f})  ece {scores['ece']:.4f}  {loss.split('/')[1]} "
                         f"{scalars[loss]:.4f}  {rate:8.0f} images/s  time left {timedelta(seconds=int(left))}")
        for hook in self.hooks:
            hook(self, dict(report))  # what it changes is its own
        self.callbacks.on_epoch_end(math.ceil(self.updates / self.report_updates) - 1, {
            tag: value for tag, value in report.items() if isinstance(value, int | float)})

    def _write_arrays(self, test: np.ndarray, pseudo_labels: dict) -> None:
        self.run.write_arrays("predictions", probabilities=test, labels=self.data.test_labels,
                                 step=self.updates * self.batch)
        self.run.write_arrays("pseudo_labels", **pseudo_labels)
        sure, wrong = test.max(1), test.argmax(1) != self.data.test_labels
        worst = np.flatnonzero(wrong)[np.argsort(-sure[wrong], kind="stable")]
        chosen = np.union1d(worst[:TEST_SAMPLE], np.argsort(sure, kind="stable")[:TEST_SAMPLE])
        self.run.write_arrays("test_samples", images=self.data.shown(chosen, test=True), index=chosen)
        if self.model.augmenter.learns_rates:
            self.run.write_rates(self.model.augmenter.rates.numpy(),
                                    {"ops": list(OPS), "bins": [list(op.bins) for op in OPS.values()]})

    def save(self) -> None:
        """Writes a checkpoint; TensorFlow makes it visible only when it is complete."""
        with self.group.errors_stop_all():
            if self.is_chief:
                with self._whole_or_error("checkpoint"):
                    self.checkpoint.save_counter.assign_add(1)
                    self.checkpoint.write(self.run.checkpoint_at(self.updates * self.batch))
                self.run.keep_checkpoints(self.config.training.keep_ckpt)

    @contextmanager
    def _whole_or_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except (tf.errors.OpError, OSError) as error:
            reason = str(getattr(error, "message", error)).strip().splitlines()[0][:150]
            good = (self.run.checkpoints() or ["none yet"])[-1]
            raise UserError(f"Cannot write the {what} in {self.run.checkpoint_dir} ({reason}). Make room and give "
                            f"the same command again. Last whole checkpoint: {good}.") from error

    def _diverged(self, last: np.ndarray) -> None:
        values = zip(self.scalar_names, last[-len(self.scalar_names) - 1:-1], strict=True)
        losses = ", ".join(f"{name} = {value:g}" for name, value in values if "losses" in name)
        good = (self.run.checkpoints() or ["none yet"])[-1]
        raise UserError(f"The loss is NaN or infinite at update {self.updates + int(last[-1])}: {losses}. Last good "
                        f"checkpoint: {good}. Try a smaller --lr, or --mixed_precision=off if it was on.")


class _Clock:
    """Images per second and the time left, without what the first call of a process spends on compiling."""

    def __init__(self, images_per_update: int):
        self.images_per_update = images_per_update
        self.busy, self.seen, self.first = 0.0, 0, 0.0  # seconds and updates since the last report; of the first call
        self.started, self.done = 0.0, 0  # when the first call had ended, updates since then

    def add(self, count: int, seconds: float, chunk: int) -> int:
        """Counts a call of `count` updates; returns how many the next one should run."""
        if not self.started:
            self.started, self.first = time.perf_counter(), seconds / count
            return chunk
        self.busy, self.seen, self.done = self.busy + seconds, self.seen + count, self.done + count
        return max(1, min(2 * chunk, int(CHUNK_SECONDS * count / max(seconds, 1e-6))))

    def report(self, updates_left: int) -> tuple[float, float]:
        """Returns images per second since the last report and the seconds left, reports included; starts again."""
        rate = self.seen * self.images_per_update / self.busy if self.seen else self.images_per_update / self.first
        each = (time.perf_counter() - self.started) / self.done if self.done else self.first
        self.busy, self.seen = 0.0, 0
        return rate, updates_left * each


def update_loop(model: SSLModel, strategy: tf.distribute.Strategy, totals: tf.Variable | None = None,
                names: list[str] | None = None) -> Callable[[Iterator, tf.Tensor], tf.Tensor]:
    """Returns a function that runs updates with batches from an iterator.

    It takes the iterator and an int32 count, adds every update's scalars, and 1, to `totals` [CAPACITY + 1], and
    returns those of the last update, or of the first that has one that is not finite, with the number of that update;
    `names` becomes the names of those just before the 1.
    """
    names = [] if names is None else names

    def step(state, batch):
        state, scalars = model.update.next_state(state, model.make_views(batch, state))
        if len(scalars) > CAPACITY:
            raise ValueError(f"{type(model).__name__} logs {len(scalars)} scalars; at most {CAPACITY} fit.")
        names[:] = sorted(scalars)
        values = tf.stack([*(tf.cast(scalars[name], tf.float64) for name in names), tf.ones([], tf.float64)])
        return state, tf.pad(values, [[CAPACITY - len(names), 0]])

    @tf.function(autograph=False)  # which would rewrite everything that the step calls
    def run(iterator, count):
        def goes_on(done, *_):
            with tf.device(HOST):
                return done < count

        def update(done, sums, last, state):
            state, values = strategy.run(step, args=(state, iterator.get_next()))
            values = strategy.experimental_local_results(values)[0]  # equal on all replicas
            counted = tf.concat([values[:-1], last[-1:] + 1], 0)
            last = tf.where(tf.reduce_all(tf.math.is_finite(last)), counted, last)
            return done + 1, sums + values, last, state

        # The state goes round as tensors: variables are read before the first update and written after the last. What
        # ends the loop is known beforehand: asking for the loss would make a GPU wait for the host at every update, and
        # the next update's views for the end of this one. A NaN stays: it is found after the last update.
        # What a replica reads enters the loop where that replica is only if something there (Identity) passes it on.
        state = strategy.run(lambda: tf.nest.map_structure(tf.identity, model.update.pack(model.update.read())))
        nothing = tf.zeros([CAPACITY + 1], tf.float64)
        start = tf.zeros([], tf.int32), nothing if totals is None else totals.read_value(), nothing, state
        # TensorFlow puts the ends of a loop's body nowhere, and so every replica's state on the first device and back:
        # what a loop only passes on belongs beside its input.
        with tf.compat.v1.device(lambda op: op.inputs[0].device if op.type == "Identity" and len(op.inputs)
                                 and not op.device else op.device):
            _, sums, last, state = tf.while_loop(goes_on, update, start,
                                                 parallel_iterations=2 if strategy.num_replicas_in_sync == 1 else 1)
        strategy.run(lambda state: model.update.write(model.update.unpack(state)), args=(state,))
        if totals is not None:
            totals.assign(sums)
        return last

    return run


def distributed_batches(model: SSLModel, data: SSLData, strategy: tf.distribute.Strategy, start: int = 0) -> Iterator:
    """Returns the batches of a model's updates from `start` on, shared out to the replicas of a strategy."""
    def make(context: tf.distribute.InputContext):
        local = strategy.num_replicas_in_sync // context.num_input_pipelines
        return batches(data, batch=model.options.batch, uratio=model.options.uratio if model.uses_unlabeled else 0,
                       seed=model.seed, start_step=start, num_shards=strategy.num_replicas_in_sync,
                       first_shard=context.input_pipeline_id * local, local_shards=local)

    return iter(strategy.distribute_datasets_from_function(make))
