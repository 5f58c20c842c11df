"""UDA (Xie et al. 2020): the strong view should be given the sharpened distribution of the weak view."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, SSLModel, losses


class UDA(SSLModel):
    """Divergence of the strong view from the weak one, where the weak one is confident; optional annealing."""

    presets = {"any": {"augment": "d.d.rac"}}

    class Options(SSLModel.Options):
        confidence: float = option(0.95, "beta: threshold on the largest class probability of the weak view", low=0,
                                   high=1, named=True)
        temperature: float = option(1.0, "tau: of the sharpening of the weak view's distribution", above=0)
        we: float = option(0.0, "weight of the entropy of the weak views", low=0)
        tsa: str = option("no", "training signal annealing: leaves labelled images out whose class is more probable "
                          "than a rising threshold", choices=("no", "linear", "exp", "log"))

    def compute_losses(self, views, step):
        """[p_label <= eta] H(label, p) + wu [max q >= beta] KL(q^(1 / tau) || p) + we H(q)."""
        options = self.options
        x, weak, strong = self.forward_together(views, step)
        xe = losses.cross_entropy(x, views["label"])
        used = tf.cast(tf.exp(-xe) <= self.signal_threshold(step), tf.float32)
        xe = tf.math.divide_no_nan(tf.reduce_sum(xe * used), tf.reduce_sum(used))

        mask = losses.confidence_mask(tf.stop_gradient(tf.nn.softmax(weak)), options.confidence)
        target = tf.stop_gradient(tf.nn.softmax(weak / options.temperature))
        kl = tf.reduce_mean(losses.kl_divergence(target, strong) * mask)
        entropy = tf.reduce_mean(losses.entropy(weak))
        scalars = {"losses/xe": xe, "losses/xeu": kl, "losses/entropy": entropy, "monitors/tsa": tf.reduce_mean(used)}
        return LossOutput(xe + options.wu * kl + options.we * entropy, scalars, pseudo_labels=(weak, mask))

    def signal_threshold(self, step):
        """eta rises from 1 / classes to 1 over the run; all images count without annealing."""
        if self.options.tsa == "no":
            return 1.0
        time = step.ramp(self.total_images)
        progress = {"linear": time, "exp": tf.exp(5 * (time - 1)), "log": 1 - tf.exp(-5 * time)}[self.options.tsa]
        return progress * (1 - 1 / self.num_classes) + 1 / self.num_classes


if __name__ == "__main__":
    cssl.main(UDA)
