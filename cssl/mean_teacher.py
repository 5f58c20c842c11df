"""Mean Teacher (Tarvainen & Valpola 2017): the average of the weights teaches the weights."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import ConsistencyOptions, LossOutput, SSLModel, losses


class MeanTeacher(SSLModel):
    """Squared difference of the averaged network's prediction on one weak view and the network's on another."""

    views_per_image = (2, 0)

    class Options(ConsistencyOptions):
        consistency_weight: float = option(50.0, "weight of the consistency loss after the warm-up", low=0)

    def compute_losses(self, views, step):
        """H(label, p) + w(t) mean_k (q_k - p_k)^2, q from the averaged weights (Sec. 2)."""
        xe = self.labeled_cross_entropy(views, step)
        first, second = tf.split(views["weak"], 2)
        teacher = step.forward(first, ema=True)  # in training mode: its statistics are those of the batch
        student = step.forward(second, update_statistics=False)
        target = tf.stop_gradient(tf.nn.softmax(teacher))
        xeu = tf.reduce_mean(losses.squared_error(tf.nn.softmax(student), target))
        weight = self.options.consistency_weight * step.ramp(self.options.warmup_pos * self.total_images)
        return LossOutput(xe + weight * xeu, {"losses/xe": xe, "losses/xeu": xeu}, pseudo_labels=(teacher, None))


if __name__ == "__main__":
    cssl.main(MeanTeacher)
