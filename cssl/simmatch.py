"""SimMatch (Zheng et al. 2022): strong and weak view are equally like each labelled image, and agree in class."""
import numpy as np

import cssl
from libml import networks
from libml.config import option
from libml.lazy import tf
from libml.learn import Equal, LossOutput, SSLModel, banks, losses

DIMENSION = 128


class SimMatch(SSLModel):
    """FixMatch with soft targets from class predictions and likeness to labelled images, and a loss for the latter."""

    communicates = True

    class Options(SSLModel.Options):
        confidence: float = option(0.95, "tau: threshold on the largest value of the target", low=0, high=1, named=True)
        w_in: float = option(1.0, "lambda_in: weight of the loss on likeness to labelled images", low=0, named=True)
        alpha: float = option(0.9, "alpha: share of the class prediction in the target", low=0, high=1)
        temperature: float = option(0.1, "t: of the likeness of embeddings", above=0)
        bank_momentum: float = option(0.7, "share of the old embedding of a labelled image that is kept", low=0, high=1)
        warmup_kimg: float = option(64.0, "kimg without use of the labelled images' embeddings", low=0)

    def with_heads(self, network):
        return networks.Heads(network, {"z": networks.Projection(DIMENSION, seed=self.seed)})

    def initial_state(self):
        """The last 32 mean predictions; embedding and class of each labelled image."""
        if not self.num_labeled:
            raise ValueError("SimMatch keeps an embedding per labelled image: give set_sizes=(labelled, unlabelled).")
        rows = np.random.RandomState(self.seed % 2 ** 32).normal(size=(self.num_labeled, DIMENSION))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return {"means": Equal(np.zeros((32, self.num_classes), np.float32)), "bank": Equal(rows.astype(np.float32)),
                "classes": np.zeros(self.num_labeled, np.int32)}

    def targets(self, a, z, state):
        """Class targets [N, C] and likeness [N, labelled], each informed by the other."""
        likeness = self.likeness(z, state["bank"])
        by_instance = likeness * tf.gather(a, state["classes"], axis=1)
        by_class = tf.matmul(likeness, tf.one_hot(state["classes"], self.num_classes))
        return (self.options.alpha * a + (1 - self.options.alpha) * by_class,
                tf.math.divide_no_nan(by_instance, tf.reduce_sum(by_instance, 1, keepdims=True)))

    def likeness(self, z, bank):
        return tf.nn.softmax(tf.matmul(z, bank, transpose_b=True) / self.options.temperature)

    def updated_bank(self, index, z, label, step):
        """The bank after labelled images of all replicas; of one that occurs twice, the last view counts."""
        z = tf.gather(z, banks.last_occurrence(index))
        keep = self.options.bank_momentum
        z = tf.math.l2_normalize(keep * tf.gather(step.state["bank"], index) + (1 - keep) * z, -1)
        return {name: tf.tensor_scatter_nd_update(step.state[name], index[:, tf.newaxis], rows)
                for name, rows in {"bank": z, "classes": label}.items()}

    def compute_losses(self, views, step):
        """H(label, p) + wu [max t >= tau] H(t, p) + w_in H(likeness of weak, likeness of strong)."""
        options = self.options
        (x, z_x), (weak, z_w), (strong, z_s) = self.forward_together(views, step, ("logits", "z"))
        q = tf.stop_gradient(tf.nn.softmax(weak))
        (mean,), (index, z, label) = step.exchange(
            [tf.reduce_mean(q, 0)], [views["labeled_index"], tf.stop_gradient(z_x), views["label"]])
        means = banks.push(step.state["means"], mean[tf.newaxis])
        total = tf.reduce_sum(means, 0)  # a new queue is all zeros: only proportions matter
        a = losses.align(q, p_data=1 / self.num_classes, p_model=total / tf.reduce_sum(total))
        target, like = self.targets(a, tf.stop_gradient(z_w), step.state)
        ready = step.images_seen >= round(1024 * options.warmup_kimg)
        target = tf.where(ready, target, a)
        mask = losses.confidence_mask(target, options.confidence)
        bank = self.updated_bank(index, z, label, step)

        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        xeu = tf.reduce_mean(mask * losses.soft_cross_entropy(strong, target))
        logits = tf.matmul(z_s, step.state["bank"], transpose_b=True) / options.temperature
        instance = tf.where(ready, tf.reduce_mean(losses.soft_cross_entropy(logits, like)), 0.0)
        scalars = {"losses/xe": xe, "losses/xeu": xeu, "losses/in": instance}
        return LossOutput(xe + options.wu * xeu + options.w_in * instance, scalars, {**bank, "means": means},
                          (target, mask))


if __name__ == "__main__":
    cssl.main(SimMatch)
