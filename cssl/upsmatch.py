"""UPSMatch: FixMatch that also asks Monte-Carlo dropout how sure it is (the paper's UPS variant, Rizve et al. 2021)."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import SSLModel, UnlabeledLoss, losses


class UPSMatch(SSLModel):
    """FixMatch's loss where max q >= tau and the dropout passes agree about the class to within kappa."""

    pass_options = ("mc_dropout",)

    class Options(SSLModel.Options):
        conf_p: float = option(0.7, "tau: threshold on the largest class probability of the weak view", low=0,
                               high=1, named=True)
        uncertainty_p: float = option(0.05, "kappa: largest standard deviation over the dropout passes", low=0, high=1,
                                      named=True)
        mc_passes: int = option(8, "dropout passes over the weak images", low=1, high=1000)
        dropout: float = option(0.3, "dropout rate, in these passes only", low=0, high=0.999)

    def unlabeled_loss(self, weak, strong, views, step):
        """H(argmax q, p), [max q >= tau] and [u <= kappa]; u: population deviation at argmax of the mean pass."""
        q = tf.stop_gradient(tf.nn.softmax(weak))
        passes = [tf.nn.softmax(step.forward(views["weak"], training=False, mc_dropout=True))
                  for _ in range(self.options.mc_passes)]
        passes = tf.stop_gradient(tf.stack(passes))  # [passes, N, classes]
        y = tf.argmax(tf.reduce_mean(passes, 0), -1)
        u = tf.gather(tf.math.reduce_std(passes, 0), y, batch_dims=1)
        certain = tf.tile(tf.cast(u <= self.options.uncertainty_p, tf.float32), [self.options.K])
        mask = losses.confidence_mask(q, self.options.conf_p) * certain
        return UnlabeledLoss(losses.cross_entropy(strong, tf.argmax(q, -1)), mask,
                             {"monitors/uncertainty": tf.reduce_mean(u)})


if __name__ == "__main__":
    cssl.main(UPSMatch)
