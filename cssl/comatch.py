"""CoMatch (Li, Xiong & Hoi 2021): pseudo-labels smoothed over a memory, and a graph of them to learn embeddings."""
import numpy as np

import cssl
from libml import networks
from libml.config import option
from libml.lazy import tf
from libml.learn import Equal, LossOutput, SharedOptions, SSLModel, banks, losses


class CoMatch(SSLModel):
    """Soft pseudo-labels of two strong views: for the classes of the first, for the likeness of both."""

    communicates = True
    views_per_image = (1, 2)
    presets = {"stl10": {"wc": 5.0}}  # USB's

    class Options(SharedOptions):
        wu: float = option(1.0, "lambda_u: weight of the unlabelled loss", low=0, named=True)
        wc: float = option(1.0, "lambda_c: weight of the contrastive loss; USB: 5 for STL-10", low=0, named=True)
        confidence: float = option(0.95, "tau: threshold on the largest value of the smoothed pseudo-label", low=0,
                                   high=1, named=True)
        alpha: float = option(0.9, "alpha: share of the own prediction in the pseudo-label, the rest is the memory's",
                              low=0, high=1)
        temperature: float = option(0.2, "t: of the likeness of embeddings", above=0)
        contrast_th: float = option(0.8, "likeness of pseudo-labels below which two images are no neighbours", low=0,
                                    high=1)
        queue_batch: int = option(5, "batches in the memory", low=1)
        low_dim: int = option(64, "length of the embeddings", low=1)

    def with_heads(self, network):
        return networks.Heads(network, {"z": networks.Projection(self.options.low_dim, slope=0.1, seed=self.seed)})

    def initial_state(self):
        """The last 32 mean predictions, and the memory of embeddings with pseudo-labels."""
        options = self.options
        size = options.queue_batch * (options.uratio + 1) * options.batch
        shapes = {"means": (32, self.num_classes), "bank_z": (size, options.low_dim),
                  "bank_q": (size, self.num_classes)}
        return {name: Equal(np.zeros(shape, np.float32)) for name, shape in shapes.items()}

    def over_mean(self, q, means):
        """q over the mean of the last predictions, normalised [N, C]; the authors add nothing to either."""
        a = tf.math.divide_no_nan(q, tf.reduce_sum(means, 0))
        return a / tf.reduce_sum(a, 1, keepdims=True)

    def smoothed(self, a, z, step):
        """alpha a + (1 - alpha) softmax(z bank_z / t) bank_q, once the memory is full and a batch old."""
        bank_z, bank_q = step.state["bank_z"], step.state["bank_q"]
        likeness = tf.nn.softmax(tf.matmul(z, bank_z, transpose_b=True) / self.options.temperature)
        mixed = self.options.alpha * a + (1 - self.options.alpha) * tf.matmul(likeness, bank_q)
        ready = step.images_seen // self.options.batch > self.options.queue_batch
        return tf.where(ready & tf.reduce_any(bank_q[0] > 0), mixed, a)

    def contrastive(self, target, z0, z1):
        """H of each row [N] of the graph of embeddings with that of pseudo-labels."""
        graph = tf.linalg.set_diag(tf.matmul(target, target, transpose_b=True), tf.ones_like(target[:, 0]))
        graph = tf.where(graph < self.options.contrast_th, 0.0, graph)
        graph /= tf.reduce_sum(graph, 1, keepdims=True)
        likeness = tf.nn.softmax(tf.matmul(z0, z1, transpose_b=True) / self.options.temperature)
        return -tf.reduce_sum(graph * tf.math.log(likeness + 1e-7), 1)

    def compute_losses(self, views, step):
        """H(label, p) + wu [max t >= tau] H(t, p(s0)) + wc contrastive(t, z0, z1)."""
        options = self.options
        (x, z_x), (weak, z_w), (strong, z_s) = self.forward_together(views, step, ("logits", "z"))
        size = views["weak"].shape[0]
        z_x, z_w = tf.stop_gradient(z_x), tf.stop_gradient(z_w[:size])
        q = tf.stop_gradient(tf.nn.softmax(weak[:size]))
        (mean,), (*z, label) = step.exchange([tf.reduce_mean(q, 0)], [z_w, z_x, views["label"]])
        means = banks.push(step.state["means"], mean[tf.newaxis])
        a = self.over_mean(q, means)
        target = self.smoothed(a, z_w, step)
        mask = losses.confidence_mask(target, options.confidence)
        everywhere, *pairs = step.gather([a, target, z_s[:size], z_s[size:]])
        new = {"bank_z": z, "bank_q": (everywhere, tf.one_hot(label, self.num_classes))}
        state = {name: banks.push(step.state[name], tf.concat(parts, 0)) for name, parts in new.items()}

        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        xeu = tf.reduce_mean(mask * losses.soft_cross_entropy(strong[:size], target))
        contrast = tf.reduce_mean(self.contrastive(*pairs))
        scalars = {"losses/xe": xe, "losses/xeu": xeu, "losses/contrast": contrast}
        return LossOutput(xe + options.wu * xeu + options.wc * contrast, scalars, {**state, "means": means},
                          (target, mask))


if __name__ == "__main__":
    cssl.main(CoMatch)
