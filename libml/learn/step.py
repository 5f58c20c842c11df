"""What a loss may use within one update, and what it returns."""
from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from libml.errors import UserError
from libml.lazy import keras, tf
from libml.learn.packing import Means, Rows, exchange, replicas
from libml.randomness import fold_in

if TYPE_CHECKING:
    from libml.learn.model import SSLModel
    from libml.learn.update import State


class LossOutput(NamedTuple):
    """What `SSLModel.compute_losses` returns, of this replica's images."""

    loss: tf.Tensor  # scalar to minimise, without weight decay
    scalars: dict[str, tf.Tensor]  # what is logged, by tag
    state: Mapping[str, tf.Tensor] = {}  # the new value of every entry of `SSLModel.initial_state`, by name
    # For the log: scores [N, C], whose argmax are the pseudo-labels, and which of them are used (mask [N]; None: all).
    pseudo_labels: tuple[tf.Tensor, tf.Tensor | None] | None = None
    mean_prediction: tf.Tensor | None = None  # [C], of predictions, for later updates to align with


class UnlabeledLoss(NamedTuple):
    """What `SSLModel.unlabeled_loss` returns: loss [N] and mask [N] per strong view, the rest as in `LossOutput`."""

    loss: tf.Tensor
    mask: tf.Tensor
    scalars: Mapping[str, tf.Tensor] = {}
    state: Mapping[str, tf.Tensor] = {}
    mean_prediction: tf.Tensor | None = None


def check_passes(model: SSLModel, network: keras.Model, options: Iterable[str]) -> None:
    """Raises UserError where a pass asks for what a model of mere layers would take, and ignore."""
    if list(options) and type(network).call.__module__.startswith("keras."):
        raise UserError(f"{type(model).__name__} needs a network that knows {', '.join(options)}, which the "
                        f"{type(network).__name__} {network.name} does not: use one of libml.networks, or your own "
                        "whose call takes it.")


class Step:
    """Forward passes, seeds, state and the time of one update, while it is traced. A loss writes nothing here."""

    def __init__(self, model: SSLModel, seed: tf.Tensor, state: State):
        self.model, self._before = model, state
        self.updates, self.images_seen = state.updates, model.images_after(state.updates)  # before this update
        self.weights, self.ema_weights, self.statistics = state.weights, state.ema, state.statistics
        self.new_statistics = self.statistics  # all that one forward pass leaves to the next
        self.state, self.predictions = dict(state.method), state.others.get("predictions")
        self.loss_scale = state.others.get("loss_scale")
        self._seed, self._seeds_given = seed, 0

    def new_seed(self) -> tf.Tensor:
        """Returns a seed [2] that nothing else in this step uses."""
        self._seeds_given += 1
        return fold_in(self._seed, self._seeds_given)

    def forward(self, images: tf.Tensor, *, outputs: tuple[str, ...] | None = None, training: bool = True,
                update_statistics: bool = True, ema: bool = False, weights: Sequence[tf.Tensor] | None = None,
                **options: tf.Tensor | float) -> tf.Tensor | tuple[tf.Tensor, ...]:
        """Runs the network once.

        Args:
            images: [N, H, W, channels] float views.
            outputs: what to return, as a tuple: "logits", "embedding", or heads by name. None: the class logits alone.
            training: whether batch normalisation uses the statistics of this batch.
            update_statistics: whether this (training) pass moves batch normalisation's averages.
            ema: whether to use the averaged weights instead of the current ones.
            weights: to be used instead of the current ones.
            **options: further arguments of the network's call, such as `mc_dropout`.
        """
        network, weights = self.model.network, self.ema_weights if ema else weights or self.weights
        check_passes(self.model, network, options)
        taken = inspect.signature(network.call).parameters
        if "seed" in taken:
            options["seed"] = self.new_seed()
        if outputs is not None:
            if "outputs" not in taken:
                raise ValueError(f"outputs={outputs}: {type(network).__name__} gives class logits only; use a network "
                                 "of libml.networks, or one whose call takes `outputs`.")
            options["outputs"] = tuple(outputs)
        found, statistics = self.model.run_network(
            weights, self.new_statistics if training else self.statistics, images, training=training, **options)
        if training and update_statistics and not ema:
            self.new_statistics = statistics
        return found if outputs is not None else tf.cast(found, tf.float32)  # networks of one's own may give half

    def ramp(self, images: float) -> tf.Tensor:
        """Rises from 0 to 1 while the given number of labelled images is seen; is 1 if that number is 0."""
        if images <= 0:
            return tf.ones([])
        return tf.clip_by_value(tf.cast(self.images_seen, tf.float32) / images, 0.0, 1.0)

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the gradients on this replica, too large by the loss scale, which `updated_weights` takes away."""
        return tape.gradient(loss, weights, output_gradients=self.loss_scale, unconnected_gradients="zero")

    def updated_weights(self, group: str, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns all weights as they are once a group has taken its step along its gradients and decayed."""
        return self.model.update.weights_after(group, self._before, gradients)

    def gather(self, tensors: Rows) -> Rows:
        """Concatenates tensors [n, …] of any dtype over all replicas, in their order; gradients flow back to floats."""
        return self.exchange([], tensors)[1]

    def mean(self, tensors: Means) -> Means:
        """Averages float tensors over all replicas, for what this very step uses."""
        return self.exchange(tensors, [])[0]

    def exchange(self, means: Means, rows: Rows) -> tuple[Means, Rows]:
        """Averages floats and gathers rows at once: each exchange makes all devices wait for each other."""
        context = replicas()
        if context is not None and self.model.jit:  # collectives cannot be part of a function that XLA compiles
            raise ValueError(f"--jit cannot compile {type(self.model).__name__}'s communication between "
                             f"{context.num_replicas_in_sync} replicas; leave it out.")
        return exchange(means, rows)

