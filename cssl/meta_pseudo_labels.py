"""Meta Pseudo Labels (Pham et al. 2021): a teacher, trained like UDA and by what its labels do to a student."""
import math

import numpy as np

import cssl
from libml import networks
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, SharedOptions, SSLModel, losses, mixing
from libml.randomness import derived_seed


class MetaPseudoLabels(SSLModel):
    """The student learns the teacher's labels of strong views; the teacher, how that changes the student's loss."""

    views_per_image = (1, 1)
    communicates = True  # the student's step comes before the teacher's gradient
    presets = {"any": {"augment": "d.d.rac", "bn_momentum": 0.99}}

    class Options(SharedOptions):
        batch: int = option(128, "B: labelled images per update", low=1, named=True)
        lr: float = option(0.05, "eta: highest learning rate of teacher and student; rises linearly, falls as half a "
                           "cosine", above=0, named=True)
        wd: float = option(0.0005, "weight decay: factor of 0.5 ||W||^2 over all but batch normalisation", low=0,
                           named=True)
        ema: float = option(0.995, "decay of the average of the student's weights; (1 + k) / (10 + k) at update k if "
                            "that is less", low=0, high=1)
        warmup_pos: float = option(0.016667, "part of the run over which rates and wu rise (5000 of 300,000 updates)",
                                   low=0, high=1)
        wait_pos: float = option(0.01, "part of the run over which the student waits for the teacher (3000 updates)",
                                 low=0, high=0.99)
        wu: float = option(8.0, "weight of the teacher's UDA loss", low=0, named=True)
        confidence: float = option(0.6, "threshold of the UDA loss on the largest sharpened probability", low=0, high=1)
        temperature: float = option(0.7, "of the UDA loss's target", above=0)
        label_smoothing: float = option(0.15, "of labels and of the student's targets", low=0, high=1)
        dropout: float = option(0.2, "rate of dropout on the embedding, in all passes of training", low=0, high=0.99)
        feedback: str = option("soft", "the teacher's label of a strong view: its distribution, whose feedback has no "
                               "gradient (the authors' program); one drawn class (the paper); none: a soft label, and "
                               "no feedback", choices=("none", "soft", "hard"))
        sign: str = option("code", "of the feedback: the student's loss after its step minus that before (the authors' "
                           "program), or before minus after (the paper)", choices=("code", "paper"))

    def __init__(self, network, num_classes, *, teacher=None, seed=0, **arguments):
        if teacher is None:
            if getattr(network, "twin", None) is None:
                raise ValueError(f"A {type(network).__name__} cannot be built twice: give the model a `teacher` too, "
                                 "or use a network of libml.networks.")
            teacher = network.twin(derived_seed(seed, 2 ** 31))
        super().__init__(networks.TeacherAndStudent(network, teacher), num_classes, seed=seed, **arguments)

    def initial_state(self):
        return {"baseline": np.zeros((), np.float32)}

    def weight_groups(self):
        student, teacher = (self.group(network.trainable_variables, lambda v: v.name not in ("gamma", "beta"))
                            for network in (self.network.student, self.network.teacher))
        return {"student": student, "teacher": teacher._replace(learning_rate=self.teacher_rate)}

    def teacher_rate(self, images_seen, wait=0.0):
        """lr (k + 1) / warm-up for its updates k, then lr (1 + cos(pi t)) / 2; both begin after a wait."""
        batch = self.options.batch
        length, warmup = self.total_images / batch * (1 - wait), self.total_images / batch * self.options.warmup_pos
        update = tf.cast(images_seen // batch, tf.float32) - self.total_images / batch * wait
        time = tf.clip_by_value((update - warmup) / max(length - warmup, 1.0), 0.0, 1.0)
        rate = tf.minimum((update + 1) / max(warmup, 1.0), 0.5 * (1 + tf.cos(math.pi * time)))
        return tf.where(update < 0, 0.0, self.options.lr * rate)

    def learning_rate(self, images_seen):
        """The student's: the teacher's law, in what is left of the run after its wait."""
        return self.teacher_rate(images_seen, self.options.wait_pos)

    def ema_decay(self, updates):
        """The average begins with the weights as they are and gets slower."""
        updates = tf.cast(updates, tf.float32)
        return tf.minimum(self.options.ema, (1 + updates) / (10 + updates))

    def smooth(self, target):
        return (1 - self.options.label_smoothing) * target + self.options.label_smoothing / self.num_classes

    def compute_gradients(self, views, step):
        """The student's step on H(label of the teacher, p_S(s)), then the teacher's gradient with its feedback."""
        options, size = self.options, [views[name].shape[0] for name in ("labeled", "weak", "strong")]
        passes = {"embedding_dropout": options.dropout} if options.dropout else {}
        indices = {name: group.indices for name, group in self.update.groups.items()}
        student, teacher = ([step.weights[i] for i in indices[name]] for name in ("student", "teacher"))

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(teacher)
            together = tf.concat([views["labeled"], views["weak"], views["strong"]], 0)
            x, weak, strong = tf.split(step.forward(together, teacher=True, update_statistics=False, **passes), size)
            one_hot = tf.one_hot(views["label"], self.num_classes)
            xe = tf.reduce_mean(losses.soft_cross_entropy(x, self.smooth(one_hot)))
            q = tf.stop_gradient(tf.nn.softmax(weak / options.temperature))
            mask = losses.confidence_mask(q, options.confidence)
            uda = tf.reduce_mean(mask * losses.soft_cross_entropy(strong, q))
            label = soft = tf.stop_gradient(tf.nn.softmax(strong))
            if options.feedback == "hard":
                label = tf.one_hot(mixing.draw_labels(soft, step.new_seed()), self.num_classes)

            own, gradients = self.student_step(views, step, self.smooth(label), student, passes)
            h = own.scalars["monitors/feedback"]
            ramp = step.ramp(options.warmup_pos * self.total_images)
            loss = xe + options.wu * ramp * uda + h * tf.reduce_mean(losses.soft_cross_entropy(strong, label))
        by_position = dict(zip([*indices["student"], *indices["teacher"]],
                               [*gradients, *step.gradients(tape, loss, teacher)], strict=True))
        scalars = {**own.scalars, "losses/xe": xe, "losses/xeu": uda, "losses/teacher": loss,
                   "monitors/mask": tf.reduce_mean(mask)}
        return ([by_position[i] for i in range(len(step.weights))],
                LossOutput(loss + own.loss, scalars, own.state, (soft, None)))

    def student_step(self, views, step, target, weights, passes):
        """The student's loss, with h, what its step did to its labelled loss; and its gradients over all replicas."""
        size = [target.shape[0], views["labeled"].shape[0]]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            strong, x = tf.split(step.forward(tf.concat([views["strong"], views["labeled"]], 0), **passes), size)
            loss = tf.reduce_mean(losses.soft_cross_entropy(strong, target))
        gradients = step.mean(step.gradients(tape, loss, weights))
        before = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        h, baseline = tf.zeros([]), step.state["baseline"]
        if self.options.feedback != "none":
            new = step.forward(views["labeled"], weights=step.updated_weights("student", gradients),
                               update_statistics=False, **passes)
            after = tf.reduce_mean(losses.cross_entropy(new, views["label"]))
            change = step.mean(tf.stop_gradient(after - before))
            change = -change if self.options.sign == "paper" else change
            baseline += 0.01 * (change - baseline)
            h = change - baseline
        scalars = {"losses/student": loss, "losses/student_xe": before, "monitors/feedback": h}
        return LossOutput(loss, scalars, {"baseline": baseline}), gradients


if __name__ == "__main__":
    cssl.main(MetaPseudoLabels)
