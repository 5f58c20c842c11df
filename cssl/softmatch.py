"""SoftMatch (Chen et al. 2023): every image counts, with a weight that falls as its confidence falls below the mean."""
import numpy as np

import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import Equal, SSLModel, UnlabeledLoss, banks, losses


class SoftMatch(SSLModel):
    """Cross-entropy of the strong view with argmax q, weighted by a truncated Gaussian of the aligned confidence."""

    communicates = True

    class Options(SSLModel.Options):
        momentum: float = option(0.999, "m: decay of the averages of predictions and confidence", low=0, high=1)
        n_sigma: float = option(2.0, "divides the deviation of the weights' bell: 0 weights all images alike, a large "
                                "number makes a threshold at the mean", low=0, named=True)

    def initial_state(self):
        """Averages of predictions (zeros: none yet), of the confidence and of its variance."""
        return {"p_model": Equal(np.zeros(self.num_classes, np.float32)), "var": Equal(np.ones((), np.float32)),
                "mu": Equal(np.array(1 / self.num_classes, np.float32))}

    def weights(self, q, step):
        """exp(-min(c - mu, 0)^2 n_sigma^2 / (2 var)) [N]; c = max a; and the averages, with this batch."""
        state, decay = step.state, self.options.momentum
        p_model = banks.running_mean(state["p_model"], step.mean(tf.reduce_mean(q, 0)), decay)
        c = tf.reduce_max(losses.align(q, p_data=1 / self.num_classes, p_model=p_model), -1)
        everywhere = step.gather(c)
        mean = tf.reduce_mean(everywhere)
        variance = tf.reduce_sum((everywhere - mean) ** 2) / max(everywhere.shape[0] - 1, 1)
        mu, var = banks.running_mean(state["mu"], mean, decay), banks.running_mean(state["var"], variance, decay)
        return self.gaussian(c, mu, var), {"p_model": p_model, "mu": mu, "var": var}

    def gaussian(self, c, mu, var):
        """1 above the mean mu, the rest of a bell of variance var / n_sigma^2 below it."""
        return tf.exp(-tf.minimum(c - mu, 0.0) ** 2 * self.options.n_sigma ** 2 / (2 * var))

    def unlabeled_loss(self, weak, strong, views, step):
        q = tf.stop_gradient(tf.nn.softmax(weak))
        weights, state = self.weights(q, step)
        return UnlabeledLoss(losses.cross_entropy(strong, tf.argmax(q, -1)), weights,
                             {"monitors/confidence": state["mu"]}, state)


if __name__ == "__main__":
    cssl.main(SoftMatch)
