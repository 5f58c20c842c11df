"""LSMatch: the paper's label-smoothing counterpart of CSSL (its Algorithm 2)."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import SSLModel, UnlabeledLoss, losses


class LSMatch(SSLModel):
    """Cross-entropy of the strong view with a pseudo-label smoothed by the same alpha as in CSSL."""

    uses_alignment = True

    class Options(SSLModel.Options):
        confidence: float = option(0.0, "tau: threshold on max q of the weak view; 0: every image, as in the paper",
                                   low=0, high=1, named=True)
        reference: str = option("raw", "the class y that is smoothed: argmax of the raw or of the aligned prediction",
                                choices=("raw", "aligned"))

    def unlabeled_loss(self, weak, strong, views, step):
        """H((1 - alpha) onehot(y) + alpha / C, p)."""
        q = tf.stop_gradient(tf.nn.softmax(weak))
        a = self.aligned(q, step.predictions)
        y = tf.argmax(q if self.options.reference == "raw" else a, -1)
        alpha = 1 - tf.reduce_max(a, -1)
        loss = losses.soft_cross_entropy(strong, losses.smooth_targets(y, alpha, self.num_classes))
        mask = losses.confidence_mask(q, self.options.confidence)
        return UnlabeledLoss(loss, mask, {"monitors/alpha": tf.reduce_mean(alpha)},
                             mean_prediction=tf.reduce_mean(q, 0))


if __name__ == "__main__":
    cssl.main(LSMatch)
