"""ReFixMatch (Nguyen & Yang 2023): FixMatch that also learns, softly, from the images that are not confident."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import SSLModel, ThresholdOptions, UnlabeledLoss, losses


class ReFixMatch(SSLModel):
    """Cross-entropy with argmax q where max q >= tau, divergence from a soft target elsewhere."""

    class Options(ThresholdOptions):
        T: float = option(0.5, "temperature of both sides of the divergence", above=0)
        target: str = option("probabilities", "soft target: the softmax of q / T, as in the authors' code, or of the "
                             "logits over T, which is sharper", choices=("probabilities", "logits"))

    def unlabeled_loss(self, weak, strong, views, step):
        """mask H(argmax q, p) + (1 - mask) KL(softmax(target / T) || softmax(strong / T)), for every image."""
        q = tf.stop_gradient(tf.nn.softmax(weak))
        mask = losses.confidence_mask(q, self.options.confidence)
        target = q if self.options.target == "probabilities" else tf.stop_gradient(weak)
        soft = losses.kl_divergence(tf.nn.softmax(target / self.options.T), strong / self.options.T)
        loss = mask * losses.cross_entropy(strong, tf.argmax(q, -1)) + (1 - mask) * soft
        return UnlabeledLoss(loss, tf.ones_like(mask), {"monitors/confident": tf.reduce_mean(mask)})


if __name__ == "__main__":
    cssl.main(ReFixMatch)
