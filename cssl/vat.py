"""VAT (Miyato et al. 2018): predictions should withstand the small change of the image that hurts them most."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import AdamModel, LossOutput, losses, mixing

# Length of the first step of the power iteration. The customary 1e-6 changes a pixel by less than float32 resolves: the
# gradient is then rounding noise (cosine with the true direction 0.00 on a small residual net; 0.9995 with 1e-3).
XI = 1e-3


class VAT(AdamModel):
    """Divergence under the worst perturbation of a given length, and entropy minimisation."""

    needs_float32 = True

    class Options(AdamModel.Options):
        vat: float = option(0.3, "weight of the adversarial loss after the warm-up", low=0)
        vat_eps: float = option(6.0, "epsilon: length of the perturbation, in images with values in [-1, 1]", low=0)
        entmin_weight: float = option(0.06, "weight of the entropy of the predictions", low=0)

    def compute_losses(self, views, step):
        """H(label, p) + w(t) KL(p(y + r) || p(y)) + entmin_weight H(p(y)) (Eqs. 5-8)."""
        xe = self.labeled_cross_entropy(views, step)
        y = views["weak"]
        logits = step.forward(y, update_statistics=False)
        teacher = tf.stop_gradient(logits)
        direction = tf.stop_gradient(self.worst_direction(y, teacher, step))
        student = step.forward(y + self.options.vat_eps * direction, update_statistics=False)
        xeu = tf.reduce_mean(losses.kl_divergence(tf.nn.softmax(student), teacher))
        entropy = tf.reduce_mean(losses.entropy(logits))
        weight = self.options.vat * step.ramp(self.options.warmup_pos * self.total_images)
        return LossOutput(xe + weight * xeu + self.options.entmin_weight * entropy,
                          {"losses/xe": xe, "losses/xeu": xeu, "losses/entropy": entropy}, pseudo_labels=(logits, None))

    def worst_direction(self, y, teacher, step):
        """Unit vector per image in which the divergence grows fastest: one power iteration (Sec. 3.3)."""
        start = unit(mixing.normal(y.shape, step.new_seed()))
        with tf.GradientTape() as tape:
            tape.watch(start)
            student = step.forward(y + XI * start, update_statistics=False)
            divergence = tf.reduce_sum(losses.kl_divergence(tf.nn.softmax(student), teacher))
        return unit(tape.gradient(divergence, start))


def unit(vectors):
    """Scales images [N, H, W, channels] to length 1."""
    vectors /= tf.reduce_max(tf.abs(vectors), [1, 2, 3], keepdims=True) + 1e-30  # squares of tiny numbers vanish
    return vectors / tf.sqrt(tf.reduce_sum(vectors ** 2, [1, 2, 3], keepdims=True) + 1e-12)


if __name__ == "__main__":
    cssl.main(VAT)
