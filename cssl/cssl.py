"""CSSL (Lienen & Hüllermeier, NeurIPS 2021): credal sets as pseudo-labels, all images used from the start."""
from __future__ import annotations

import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import SSLModel, UnlabeledLoss, losses


class CSSL(SSLModel):
    """The loss of the strong view is its divergence from the credal set Q = {p : p(y) >= 1 - alpha} (Eqs. 2, 4)."""

    uses_alignment = True

    class Options(SSLModel.Options):
        confidence: float = option(0.0, "tau: threshold on max q of the weak view; 0: every image, as in the paper",
                                   low=0, high=1, named=True)
        alpha_bound: float = option(0.0, "smallest size alpha of a credal set; 0.03 in the barely supervised runs",
                                    low=0, high=1, named=True)
        reference: str = option("raw", "the class y a set is built around: argmax of the raw prediction (the paper's "
                                "code and Sec. 3.4) or of the aligned one (Algorithm 1)", choices=("raw", "aligned"))

    def credal_sets(self, images, q):
        """By the present average of predictions."""
        return losses.credal_set(q, self.aligned(q, self.predictions.value), **self.rule)

    def unlabeled_loss(self, weak, strong, views, step):
        """L*(Q, p) with Q from the weak view: y = argmax q, alpha = 1 - max a, a the aligned prediction (Sec. 3.4)."""
        q = tf.stop_gradient(tf.nn.softmax(weak))
        sets = losses.credal_set(q, self.aligned(q, step.predictions), **self.rule)
        loss = losses.credal_loss(strong, sets["class"], sets["alpha"])
        mask = losses.confidence_mask(q, self.options.confidence)
        scalars = {"monitors/alpha": tf.reduce_mean(sets["alpha"]), "metrics/kld": tf.reduce_mean(loss)}
        return UnlabeledLoss(loss, mask, scalars, mean_prediction=tf.reduce_mean(q, 0))

    @property
    def rule(self) -> dict:
        """What the options say of the sets."""
        return {"alpha_bound": self.options.alpha_bound, "reference": self.options.reference}


if __name__ == "__main__":
    cssl.main(CSSL)
