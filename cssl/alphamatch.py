"""AlphaMatch (Gong, Wang & Liu 2021): weak and strong views agree with a target under an alpha-divergence."""
import math

import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, SSLModel, losses


def powered_mean(log_p, weights, alpha):
    """log of (sum_i w_i p_ik^(1 - alpha))^(1 / (1 - alpha)) [N, C], of log p [views, N, C]."""
    if alpha == 1:
        return tf.tensordot(weights, log_p, 1)
    log_weights = tf.reshape([math.log(w) if w else -math.inf for w in weights], [-1, 1, 1])
    return tf.reduce_logsumexp(log_weights + (1 - alpha) * log_p, 0) / (1 - alpha)


class AlphaMatch(SSLModel):
    """Divergence of weak and strong views from their powered mean, without threshold."""

    uses_alignment = True
    presets = {"cifar100": {"align": True}}  # as in the paper

    class Options(SSLModel.Options):
        alpha: float = option(1.5, "alpha: of the divergence; the larger, the more the views must agree", low=0,
                              named=True)
        beta: float = option(0.5, "beta: share of the strong views", low=0, high=1, named=True)
        target: str = option("normalized", "the target g is the powered mean of the views, normalised (Eq. 12), or not "
                             "(literal: Algorithm 1 as printed)", choices=("normalized", "literal"))
        align: bool = option(False, "distribution alignment of the weak prediction within the target; for CIFAR-100")

    def compute_losses(self, views, step):
        """H(label, p) + wu ((1 - beta) D(g || p_weak) + beta mean_i D(g || p_i)) (Algorithm 1)."""
        options = self.options
        x, weak, strong = self.forward_together(views, step)
        size = views["weak"].shape[0]
        log_p = tf.reshape(tf.nn.log_softmax(tf.concat([weak[:size], strong], 0)), [1 + options.K, size, -1])
        fixed = tf.stop_gradient(log_p)
        q = tf.exp(fixed[0])
        aligned = self.aligned(q, step.predictions)
        if options.align:
            fixed = tf.concat([tf.math.log(tf.maximum(aligned, 1e-20))[tf.newaxis], fixed[1:]], 0)
        weights = [1 - options.beta] + [options.beta / options.K] * options.K
        log_g = powered_mean(fixed, weights, options.alpha)
        if options.target == "normalized":
            log_g = tf.nn.log_softmax(log_g)
        divergences = [losses.alpha_divergence(log_g, view, options.alpha) for view in tf.unstack(log_p)]
        xeu = tf.reduce_mean(sum(w * d for w, d in zip(weights, divergences, strict=True)))
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        return LossOutput(xe + options.wu * xeu, {"losses/xe": xe, "losses/xeu": xeu}, pseudo_labels=(log_g, None),
                          mean_prediction=tf.reduce_mean(q, 0))


if __name__ == "__main__":
    cssl.main(AlphaMatch)
