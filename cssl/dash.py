"""Dash (Xu et al. 2021): an unlabelled image counts while its loss is below a threshold that falls over the run."""
import numpy as np

import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import SSLModel, UnlabeledLoss, losses

WINDOW = 256  # last updates of the warm-up, whose labelled loss the threshold starts from


class Dash(SSLModel):
    """Cross-entropy of the strong view with the sharpened weak prediction t, where H(t, weak) <= rho."""

    class Options(SSLModel.Options):
        rho_min: float = option(0.05, "smallest threshold, from which on pseudo-labels are hard", low=0, named=True)
        gamma: float = option(1.27, "gamma: factor by which the threshold falls", low=1, named=True)
        C: float = option(1.0001, "C: factor of the first threshold", above=0)
        T: float = option(0.5, "temperature of soft pseudo-labels", above=0)
        warmup_kimg: float = option(128.0, "kimg on labelled images alone, at first", low=0)
        decay_kimg: float = option(640.0, "kimg between two falls of the threshold", above=0)

    def initial_state(self):
        """Sum and number of the labelled losses at the end of the warm-up."""
        return {"total": np.zeros((), np.float32), "count": np.zeros((), np.float32)}

    @property
    def warmup_images(self):
        """Labelled images before the first unlabelled one counts."""
        return round(1024 * self.options.warmup_kimg)

    def threshold(self, step):
        """rho = max(C gamma^-k rho^, rho_min); rho^: mean labelled loss after the warm-up (Eq. 17)."""
        options = self.options
        k = tf.maximum(step.images_seen - self.warmup_images, 0) // max(1, round(1024 * options.decay_kimg))
        mean = tf.math.divide_no_nan(step.state["total"], step.state["count"])
        return tf.maximum(options.C * options.gamma ** -tf.cast(k, tf.float32) * mean, options.rho_min)

    def unlabeled_loss(self, weak, strong, views, step):
        """H(t, p) and [H(t, weak) <= rho]; t = softmax(weak / T), one-hot once rho = rho_min."""
        weak, rho = tf.stop_gradient(weak), self.threshold(step)
        hard = tf.one_hot(tf.argmax(weak, -1), self.num_classes)
        target = tf.where(rho <= self.options.rho_min, hard, tf.nn.softmax(weak / self.options.T))
        chosen = (losses.soft_cross_entropy(weak, target) <= rho) & (step.images_seen >= self.warmup_images)
        mask = tf.cast(chosen, tf.float32)
        return UnlabeledLoss(losses.soft_cross_entropy(strong, target), mask, {"monitors/rho": rho}, step.state)

    def compute_losses(self, views, step):
        output = super().compute_losses(views, step)
        left = self.warmup_images - step.images_seen
        inside = tf.cast((left > 0) & (left <= WINDOW * self.options.batch), tf.float32)
        total = step.state["total"] + inside * tf.stop_gradient(output.scalars["losses/xe"])
        return output._replace(state={"total": total, "count": step.state["count"] + inside})


if __name__ == "__main__":
    cssl.main(Dash)
