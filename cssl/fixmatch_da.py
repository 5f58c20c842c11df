"""FixMatch with distribution alignment: soft, aligned pseudo-labels where the raw prediction is confident."""
import cssl
from libml.lazy import tf
from libml.learn import SSLModel, ThresholdOptions, UnlabeledLoss, losses


class FixMatchDA(SSLModel):
    """Cross-entropy of the strong view with the aligned distribution a, where max q >= tau."""

    uses_alignment = True

    class Options(ThresholdOptions):
        """FixMatch's threshold."""

    def unlabeled_loss(self, weak, strong, views, step):
        q = tf.stop_gradient(tf.nn.softmax(weak))
        a = self.aligned(q, step.predictions)
        mask = losses.confidence_mask(q, self.options.confidence)
        return UnlabeledLoss(losses.soft_cross_entropy(strong, a), mask, mean_prediction=tf.reduce_mean(q, 0))


if __name__ == "__main__":
    cssl.main(FixMatchDA)
