"""DeFixMatch (Schmutz et al. 2023): FixMatch without bias, as its unlabelled loss on labelled images is taken away."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, SSLModel, ThresholdOptions, losses


class DeFixMatch(SSLModel):
    """FixMatch's losses on unlabelled images minus the same on labelled ones, whose labels it does not use there."""

    strong_labeled_too = True

    class Options(ThresholdOptions):
        wu: float = option(0.5, "lambda_u: weight of the unlabelled loss and of what is taken away", low=0, named=True)

    def compute_losses(self, views, step):
        """(H(label, p(x)) + H(label, p(x strong))) / 2 + wu (U(weak, strong) - U(x, x strong)), U FixMatch's loss."""
        parts = [views[name] for name in ("labeled", "labeled_strong", "weak", "strong")]
        x, x_strong, weak, strong = tf.split(step.forward(tf.concat(parts, 0)), [part.shape[0] for part in parts])

        def matching(weak, strong):
            q = tf.stop_gradient(tf.nn.softmax(weak))
            mask = losses.confidence_mask(q, self.options.confidence)
            return tf.reduce_mean(mask * losses.cross_entropy(strong, tf.argmax(q, -1))), mask

        xe = sum(tf.reduce_mean(losses.cross_entropy(logits, views["label"])) for logits in (x, x_strong)) / 2
        weak = tf.tile(weak, [self.options.K, 1])
        unlabeled, mask = matching(weak, strong)
        anti, _ = matching(x, x_strong)
        scalars = {"losses/xe": xe, "losses/xeu": unlabeled, "losses/anti": anti}
        return LossOutput(xe + self.options.wu * (unlabeled - anti), scalars, pseudo_labels=(weak, mask))


if __name__ == "__main__":
    cssl.main(DeFixMatch)
