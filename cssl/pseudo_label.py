"""Pseudo-Label (Lee 2013): the network's own confident classes as labels, on the same weak view."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import ConsistencyOptions, LossOutput, SSLModel, losses


class PseudoLabel(SSLModel):
    """Cross-entropy of a weak view with its own most probable class, where that is probable enough."""

    views_per_image = (1, 0)

    class Options(ConsistencyOptions):
        consistency_weight: float = option(1.0, "weight of the pseudo-labels' loss after the warm-up", low=0)
        threshold: float = option(0.95, "class probability above which an image has a pseudo-label", low=0, high=1)

    def compute_losses(self, views, step):
        """H(label, p) + w(t) [max p > threshold] H(argmax p, p)."""
        xe = self.labeled_cross_entropy(views, step)
        logits = step.forward(views["weak"], update_statistics=False)
        mask = tf.cast(tf.reduce_max(tf.nn.softmax(logits), -1) > self.options.threshold, tf.float32)
        xeu = tf.reduce_mean(losses.cross_entropy(logits, tf.argmax(logits, -1)) * mask)
        weight = self.options.consistency_weight * step.ramp(self.options.warmup_pos * self.total_images)
        return LossOutput(xe + weight * xeu, {"losses/xe": xe, "losses/xeu": xeu}, pseudo_labels=(logits, mask))


if __name__ == "__main__":
    cssl.main(PseudoLabel)
