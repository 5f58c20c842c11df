"""ICT (Verma et al. 2019): the prediction on a mixed image should be the mixed predictions of a mean teacher."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import AdamModel, LossOutput, losses, mixing


class ICT(AdamModel):
    """Squared difference of the mixed teacher predictions and the prediction on the equally mixed images."""

    class Options(AdamModel.Options):
        consistency_weight: float = option(50.0, "weight of the consistency loss after the warm-up", low=0)
        beta: float = option(0.5, "of the Beta distribution of the mixing weights; 0: no mixing", low=0)

    def compute_losses(self, views, step):
        """H(label, p) + w(t) mean_k (Mix(q, q')_k - p(Mix(y, y'))_k)^2, where ' reverses the batch (Eq. 1)."""
        xe = self.labeled_cross_entropy(views, step)
        y = views["weak"]
        teacher = step.forward(y, ema=True)
        target = tf.stop_gradient(tf.nn.softmax(teacher))
        m = mixing.beta_weights(y.shape[0], beta=self.options.beta, seed=step.new_seed())
        student = step.forward(mixing.mix(y, y[::-1], m), update_statistics=False)
        xeu = tf.reduce_mean(losses.squared_error(tf.nn.softmax(student), mixing.mix(target, target[::-1], m)))
        weight = self.options.consistency_weight * step.ramp(self.options.warmup_pos * self.total_images)
        return LossOutput(xe + weight * xeu, {"losses/xe": xe, "losses/xeu": xeu}, pseudo_labels=(teacher, None))


if __name__ == "__main__":
    cssl.main(ICT)
