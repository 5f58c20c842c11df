"""AdaMatch (Berthelot et al. 2022): FixMatch with a relative threshold and labels' predictions as prior."""
import math

import numpy as np

import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import ALIGNMENT_LENGTH, Equal, LossOutput, Nesterov, SSLModel, banks, losses, mixing


class AdaMatch(SSLModel):
    """Cross-entropy of the strong view with argmax a, where max a >= tau times the mean confidence with labels."""

    communicates = True
    strong_labeled_too = property(lambda self: self.options.form == "authors")
    optimizer_rule = property(lambda self: Nesterov(nesterov=self.options.form == "usb"))

    class Options(SSLModel.Options):
        confidence: float = option(0.95, "tau: threshold, relative to the mean confidence on labelled images", low=0,
                                   high=1, named=True)
        momentum: float = option(0.999, "decay of the averages of predictions", low=0, high=1)
        form: str = option("usb", "USB's, one pass; or the authors': labelled images also strong, their logits between "
                           "those of two passes, a warm-up, no Nesterov", choices=("usb", "authors"))

    def learning_rate(self, images_seen):
        """As all methods', or lr cos(t arccos 1/4) in the authors' form, t the share of the run."""
        if self.options.form == "usb":
            return super().learning_rate(images_seen)
        return self.options.lr * tf.cos(math.acos(0.25) * tf.cast(images_seen, tf.float32) / self.total_images)

    def initial_state(self):
        """Predictions on labelled images, averaged; on unlabelled ones, averaged (zeros: none yet) or the last 128."""
        uniform = np.full(self.num_classes, 1 / self.num_classes, np.float32)
        unlabeled = np.zeros_like(uniform) if self.options.form == "usb" else np.tile(uniform, [ALIGNMENT_LENGTH, 1])
        return {"p_labeled": Equal(uniform), "p_unlabeled": Equal(unlabeled)}

    def targets(self, labeled, q, step):
        """Aligned predictions a [N, C], mask [N] and new state, from probabilities of labelled and of weak views."""
        options, state = self.options, step.state
        *means, confidence = step.mean([tf.reduce_mean(labeled, 0), tf.reduce_mean(q, 0),
                                        tf.reduce_mean(tf.reduce_max(labeled, -1))])
        p_l = banks.running_mean(state["p_labeled"], means[0], options.momentum)
        if options.form == "usb":
            p_u = average = banks.running_mean(state["p_unlabeled"], means[1], options.momentum)
        else:
            average = banks.push(state["p_unlabeled"], means[1][None])
            p_u = tf.reduce_mean(average, 0)
        a = losses.align(q, p_data=p_l, p_model=p_u)
        return a, losses.confidence_mask(a, options.confidence * confidence), {"p_labeled": p_l, "p_unlabeled": average}

    def warmup(self, step):
        """The weight of the unlabelled loss: (1 - cos(2 pi t)) / 2 in the first half of the authors' form, then 1."""
        if self.options.form == "usb":
            return tf.ones([])
        return 0.5 - 0.5 * tf.cos(math.pi * step.ramp(self.total_images / 2))

    def logits(self, views, step):
        """Labelled logits (each weak view, then in the authors' form each strong one), weak and strong ones."""
        if self.options.form == "usb":
            return self.forward_together(views, step)
        labeled = tf.concat([views["labeled"], views["labeled_strong"]], 0)
        alone = step.forward(labeled, update_statistics=False)
        together, weak, strong = self.forward_together({**views, "labeled": labeled}, step)
        share = mixing.uniform(together.shape, step.new_seed())
        return together + share * (alone - together), weak, strong

    def compute_losses(self, views, step):
        """H(label, p) + wu w(t) [max a >= tau mean max p(labelled)] H(argmax a, p)."""
        x, weak, strong = self.logits(views, step)
        size = views["labeled"].shape[0]
        labeled, q = (tf.stop_gradient(tf.nn.softmax(logits)) for logits in (x[:size], weak))
        a, mask, state = self.targets(labeled, q, step)
        xe = tf.reduce_mean(losses.cross_entropy(x, tf.tile(views["label"], [x.shape[0] // size])))
        xeu = tf.reduce_mean(mask * losses.cross_entropy(strong, tf.argmax(a, -1)))
        return LossOutput(xe + self.options.wu * self.warmup(step) * xeu, {"losses/xe": xe, "losses/xeu": xeu}, state,
                          (a, mask))


if __name__ == "__main__":
    cssl.main(AdaMatch)
