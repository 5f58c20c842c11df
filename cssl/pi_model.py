"""Pi-model (Laine & Aila 2017): two weak views of an image should be given the same distribution."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import ConsistencyOptions, LossOutput, SSLModel, losses


class PiModel(SSLModel):
    """Squared difference of the predictions on two weak views."""

    views_per_image = (2, 0)

    class Options(ConsistencyOptions):
        consistency_weight: float = option(10.0, "weight of the consistency loss after the warm-up", low=0)

    def compute_losses(self, views, step):
        """H(label, p) + w(t) mean_k (q_k - p_k)^2, q from the first view without gradient (Algorithm 1)."""
        xe = self.labeled_cross_entropy(views, step)
        first, second = (step.forward(y, update_statistics=False) for y in tf.split(views["weak"], 2))
        target = tf.stop_gradient(tf.nn.softmax(first))
        xeu = tf.reduce_mean(losses.squared_error(tf.nn.softmax(second), target))
        weight = self.options.consistency_weight * step.ramp(self.options.warmup_pos * self.total_images)
        return LossOutput(xe + weight * xeu, {"losses/xe": xe, "losses/xeu": xeu}, pseudo_labels=(first, None))


if __name__ == "__main__":
    cssl.main(PiModel)
