"""The update: gradients of a loss, then new weights, averages and rates."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from libml.lazy import keras, tf
from libml.learn import banks, losses
from libml.learn.packing import Packing, by_kind, exchange
from libml.learn.step import Step
from libml.randomness import fold_in

if TYPE_CHECKING:
    from libml.learn.model import SSLModel

    Tensors = list[tf.Tensor]
    Scalars = dict[str, tf.Tensor]

LOSS_SEEDS = 2  # stream of an update's random numbers; runs are continued, so it stays


class _Values(NamedTuple):
    updates: tf.Tensor  # int32, which GPUs leave to the host: seeds and schedules follow from it without waiting
    weights: Tensors
    ema: Tensors
    statistics: Tensors
    slots: Tensors
    method: Scalars  # the method's own state, by name
    others: Scalars  # predictions, loss_scale, good_steps and rates, where the model has them


class State(_Values):
    """All that an update reads and changes: a tensor for each of `SSLModel.checkpoint_items`."""


class PackedState(_Values):
    """The same with a few vectors in place of many weights, averages, statistics and slots."""


# Optimisers: pure functions from gradients to new values, so that one place can assign them on every replica.

class Nesterov:
    """SGD with Nesterov momentum in the form TensorFlow 1 had: the velocity sums gradients, not steps.

    v <- m v + g;  w <- w - lr (g + m v), or w - lr v without Nesterov's look-ahead. Unlike Keras's form, a change of
    the learning rate acts on the whole velocity at once.
    """

    slots_per_weight = 1

    def __init__(self, momentum: float = 0.9, nesterov: bool = True):
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, weights: Sequence, gradients: Sequence, slots: Sequence, lr: tf.Tensor, updates: tf.Tensor,
               ) -> tuple[Tensors, Tensors]:
        velocity = [self.momentum * v + g for v, g in zip(slots, gradients, strict=True)]
        if not self.nesterov:
            return [w - lr * v for w, v in zip(weights, velocity, strict=True)], velocity
        new = [w - lr * (g + self.momentum * v) for w, g, v in zip(weights, gradients, velocity, strict=True)]
        return new, velocity


class Adam:
    """Adam (Kingma & Ba 2015) with epsilon outside the bias correction, as the paper's faster form and TensorFlow 1."""

    slots_per_weight = 2

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8):
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def update(self, weights: Sequence, gradients: Sequence, slots: Sequence, lr: tf.Tensor, updates: tf.Tensor,
               ) -> tuple[Tensors, Tensors]:
        time = tf.cast(updates + 1, tf.float32)
        lr = lr * tf.sqrt(1 - self.beta2 ** time) / (1 - self.beta1 ** time)
        first, second = slots[:len(weights)], slots[len(weights):]
        first = [m + (1 - self.beta1) * (g - m) for m, g in zip(first, gradients, strict=True)]
        second = [v + (1 - self.beta2) * (g * g - v) for v, g in zip(second, gradients, strict=True)]
        new = [w - lr * m / (tf.sqrt(v) + self.epsilon) for w, m, v in zip(weights, first, second, strict=True)]
        return new, [*first, *second]


class Group(NamedTuple):
    indices: Sequence[int]  # positions among the network's weights
    decayed: Sequence[int]  # those of the weights that decay
    rule: Nesterov | Adam  # makes new weights of gradients
    learning_rate: Callable[[tf.Tensor], tf.Tensor]  # from labelled images seen to the rate
    wd: float  # factor of 0.5 ||W||^2 in the loss
    decoupled: bool  # instead, each update takes wd * rate of the weights away


def _warn_of_onednn(network: keras.Model) -> None:
    """See `RunConfig.trusts_onednn`."""
    from libml.devices import distribute  # needs TensorFlow

    if getattr(network, "trusts_onednn", False):
        return
    channels = {size for v in network.trainable_variables if v.name == "kernel" and len(v.shape) == 4
                for size in v.shape[2:]} - {1, 3}  # grey and coloured images
    if any(size % 16 for size in channels) and distribute.onednn_is_on():
        warnings.warn(f"{type(network).__name__} has convolutions with {min(c for c in channels if c % 16)} channels: "
                      "oneDNN, which TensorFlow uses here, computes some gradients wrong unless channels are multiples "
                      "of 16. Set TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported.", stacklevel=3)


class Update:
    """Makes a model's next state of its state and a batch of views."""

    def __init__(self, model: SSLModel):
        self.model, self.groups = model, model.weight_groups()
        trainable, statistics = model.network.trainable_variables, model.network.non_trainable_variables
        if sorted(i for group in self.groups.values() for i in group.indices) != list(range(len(trainable))):
            raise ValueError(f"{type(model).__name__}.weight_groups() must have each of the network's weights once.")
        kinds = {i: (name, i in group.decayed, trainable[i].dtype) for name, group in self.groups.items()
                 for i in group.indices}
        slots = [(name, slot, i) for name, group in self.groups.items() for slot in range(group.rule.slots_per_weight)
                 for i in group.indices]
        vectors = by_kind(kinds)
        slot_vectors = by_kind({k: (name, slot, kinds[i]) for k, (name, slot, i) in enumerate(slots)})
        self.slot_shapes = [trainable[i].shape for _, _, i in slots]
        self.weights = Packing([v.shape for v in trainable], vectors.values())
        self.slots = Packing(self.slot_shapes, slot_vectors.values())
        self.statistics = Packing([v.shape for v in statistics],
                                  by_kind({i: v.dtype for i, v in enumerate(statistics)}).values())
        self.vectors = {name: [k for k, kind in enumerate(vectors) if kind[0] == name] for name in self.groups}
        self._decayed = {k for k, kind in enumerate(vectors) if kind[1]}
        self._slot_vectors = {name: [k for k, kind in enumerate(slot_vectors) if kind[0] == name]
                              for name in self.groups}
        self.compiled = tf.function(self.backward, jit_compile=True, autograph=False)

    def _variables(self) -> State:
        items = self.model.checkpoint_items()
        method = {name: items.pop(f"state_{name}") for name in self.model.method_state}
        named = {name: items.pop(name) for name in State._fields if name in items}
        return State(**named, method=method, others=items)

    def read(self) -> State:
        """Reads all that an update depends on and changes, once.

        Data flow alone then puts every use of a value before its change. A second read would be ordered by a control
        dependency only, some of which TensorFlow's graph optimiser drops: it then reads what the step has written.
        """
        state = tf.nest.map_structure(tf.convert_to_tensor, self._variables())
        return state._replace(updates=tf.cast(state.updates, tf.int32))

    def write(self, new: State) -> None:
        """Assigns new values, equal on all replicas, with one synchronisation for all variables together."""
        new = new._replace(updates=tf.cast(new.updates, tf.int64))
        tf.nest.assert_same_structure(self._variables(), new)
        variables, values = tf.nest.flatten(self._variables()), tf.nest.flatten(new)

        def assign(strategy, *values):
            for variable, value in zip(variables, values, strict=True):
                strategy.extended.update(variable, lambda v, x: v.assign(x), args=(value,), group=False)

        tf.distribute.get_replica_context().merge_call(assign, args=tuple(values))

    def pack(self, state: State) -> PackedState:
        return PackedState(state.updates, self.weights.pack(state.weights), self.weights.pack(state.ema),
                           self.statistics.pack(state.statistics), self.slots.pack(state.slots), *state[-2:])

    def unpack(self, state: PackedState) -> State:
        return State(state.updates, self.weights.unpack(state.weights), self.weights.unpack(state.ema),
                     self.statistics.unpack(state.statistics), self.slots.unpack(state.slots), *state[-2:])

    def next_state(self, state: PackedState, views: dict) -> tuple[PackedState, Scalars]:
        """Returns the state after an update on a batch of views, and scalars to log; touches no variable."""
        model, unpacked, views = self.model, self.unpack(state), dict(views)
        _warn_of_onednn(model.network)
        probe, held_back = views.pop("probe", None), views.pop("unlabeled_label", None)  # no loss sees it
        used = unpacked._replace(others={name: value for name, value in state.others.items() if name != "rates"})
        backward = self.compiled if model.jit else self.backward
        found = backward(views, fold_in(model.step_seed(state.updates), LOSS_SEEDS), used, held_back)
        equal = {name: found["state"].pop(name) for name in model.equal_state}
        found["gradients"] = self.weights.pack(found["gradients"])
        found["statistics"] = self.statistics.pack(found["statistics"])
        lessons = []  # for CTAugment, from all replicas: they travel with the rest
        if probe is not None:
            p = tf.nn.softmax(model.infer(probe["images"], values=(unpacked.ema, unpacked.statistics)))
            lessons = [model.augmenter.lessons(probe["policy"], p, views["label"])]
        found, lessons = exchange(found, lessons)
        gradients, scalars = found["gradients"], dict(found["scalars"])
        weights, slots = self._take_steps(self.groups, state, dict(enumerate(gradients)), scalars)
        decay = model.ema_decay(state.updates)
        averages = [a - (1 - decay) * (a - w) for a, w in zip(state.ema, weights, strict=True)]
        new = state._replace(weights=weights, ema=averages, slots=slots, statistics=found["statistics"],
                             method=found["state"] | equal, others=dict(state.others))
        if model.uses_alignment:
            new.others["predictions"] = banks.push(state.others["predictions"], found["mean_prediction"][None])
        if model.loss_scaling:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
            new = tf.nest.map_structure(lambda n, o: n if n is o else tf.where(finite, n, o), new, state)
            scale, good = state.others["loss_scale"], state.others["good_steps"]
            grown = tf.where(good >= 1999, tf.minimum(2 * scale, 2.0 ** 24), scale)  # after 2000 steps without overflow
            scalars["monitors/loss_scale"] = tf.where(finite, grown, tf.maximum(scale / 2, 1.0))
            new.others["loss_scale"] = scalars["monitors/loss_scale"]
            new.others["good_steps"] = tf.where(finite & (good < 1999), good + 1, tf.zeros_like(good))
        # These go on even where float16 gradients overflowed and the update was left out.
        new = new._replace(updates=state.updates + 1)
        for rows in lessons:
            new.others["rates"] = model.augmenter.updated_rates(rows, state.others["rates"])
        return tf.nest.map_structure(lambda n, o: tf.ensure_shape(n, o.shape), new, state), scalars

    def _take_steps(self, names: Iterable[str], state: PackedState, gradients: Mapping[int, tf.Tensor],
                    scalars: Scalars) -> tuple[Tensors, Tensors]:
        """Returns the vectors of all weights and slots after a step of some groups; completes the scalars."""
        weights, slots = dict(enumerate(state.weights)), dict(enumerate(state.slots))
        scalars["losses/wd"] = tf.zeros([])
        for number, name in enumerate(names):
            group, own, own_slots = self.groups[name], self.vectors[name], self._slot_vectors[name]
            lr = self.model.rate_after(state.updates, group.learning_rate)
            scale = state.others.get("loss_scale")
            old, along = [state.weights[k] for k in own], [gradients[k] for k in own]
            if scale is not None:  # a kernel for each vector, where every weight would need one
                along = [gradient / scale for gradient in along]
            decay = losses.weight_decay(w for k, w in zip(own, old, strict=True) if k in self._decayed)
            scalars["losses/wd"] += decay
            scalars["losses/total"] += 0.0 if group.decoupled else group.wd * decay
            scalars[f"monitors/lr_{name}" if number else "monitors/lr"] = lr
            for n, k in enumerate(own):
                if k in self._decayed and group.decoupled:
                    old[n] *= 1 - group.wd * lr
                elif k in self._decayed:
                    along[n] += group.wd * old[n]
            new, new_slots = group.rule.update(old, along, [state.slots[k] for k in own_slots], lr, state.updates)
            weights.update(zip(own, new, strict=True))
            slots.update(zip(own_slots, new_slots, strict=True))
        return [*weights.values()], [*slots.values()]

    def weights_after(self, name: str, state: State, gradients: Sequence[tf.Tensor]) -> Tensors:
        own, by_position = self.vectors[name], dict(zip(self.groups[name].indices, gradients, strict=True))
        along = dict(zip(own, self.weights.pack(by_position, own), strict=True))
        weights, _ = self._take_steps([name], self.pack(state), along, {"losses/total": tf.zeros([])})
        return self.weights.unpack(weights)

    def backward(self, views: dict, seed: tf.Tensor, state: State, held_back: tf.Tensor | None = None) -> dict:
        """Forward and backward pass of one replica; `held_back` labels of unlabelled images are for monitors only."""
        model, step = self.model, Step(self.model, seed, state)
        gradients, output = model.compute_gradients(views, step)
        name, scalars = type(model).__name__, {**output.scalars, "losses/total": output.loss}
        if output.state.keys() != step.state.keys():
            raise ValueError(f"The loss of {name} returns state {sorted(output.state)}; initial_state() declares "
                             f"{sorted(step.state)}: return all of it, what stays as it is in step.state.")
        scores, mask = output.pseudo_labels or (None, None)
        if mask is not None:
            scalars["monitors/mask"] = tf.reduce_mean(mask)
        if scores is not None and held_back is not None:
            scalars |= pseudo_label_quality(scores, held_back, mask)
        found: dict[str, Any] = {"gradients": gradients, "scalars": scalars, "statistics": step.new_statistics,
                                 "state": dict(output.state)}
        if model.uses_alignment:
            if output.mean_prediction is None:
                raise ValueError(f"{name} sets uses_alignment, but its loss returns no mean_prediction: return the "
                                 "mean of q, tf.reduce_mean(q, 0), or leave uses_alignment out.")
            found["mean_prediction"] = output.mean_prediction
        return found


def pseudo_label_quality(scores: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
    """Compares argmax(scores [N, C]) with held-back labels (-1: unknown), over all images and over those used.

    Returns the shares of images that count, and that count and are right: the quotient of their sums is the accuracy
    over any number of batches, even if some have no image that counts. Of several views the first one counts.
    """
    n = labels.shape[0]
    mask = tf.ones(labels.shape) if mask is None else mask[:n]
    labels = tf.cast(labels, tf.int64)  # GPUs leave it to the host to compare integers of 32 bits
    known = tf.cast(labels >= 0, tf.float32)
    correct = known * tf.cast(tf.argmax(scores[:n], -1) == labels, tf.float32)
    return {"monitors/pseudo_known": tf.reduce_mean(known),
            "monitors/pseudo_known_correct": tf.reduce_mean(correct),
            "monitors/pseudo_used": tf.reduce_mean(known * mask),
            "monitors/pseudo_used_correct": tf.reduce_mean(correct * mask)}


def pseudo_label_accuracy(scalars: dict[str, float]) -> dict[str, float]:
    """Turns shares, averaged over batches, into accuracies; that of no pseudo-label is left out, or a tensor's NaN."""
    scalars = dict(scalars)
    for name, accuracy in (("known", "pseudo_accuracy"), ("used", "pseudo_accuracy_masked")):
        counted, right = (scalars.pop(f"monitors/pseudo_{name}{part}", 0.0) for part in ("", "_correct"))
        if not isinstance(counted, float) or counted:
            scalars[f"monitors/{accuracy}"] = right / counted
    return scalars
