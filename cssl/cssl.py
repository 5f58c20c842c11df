"""CSSL (Lienen & Hüllermeier, NeurIPS 2021): credal sets as pseudo-labels, all images used from the start."""
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

    def credal_sets(self, images, q, predictions=None):
        """y = argmax q (or a) and alpha = 1 - max a (Sec. 3.4), a aligned by `predictions` or by the present ones."""
        a = self.aligned(q, self.predictions.value if predictions is None else predictions)
        y = tf.argmax(q if self.options.reference == "raw" else a, -1)
        return {"class": y, "alpha": tf.clip_by_value(1 - tf.reduce_max(a, -1), self.options.alpha_bound, 1.0),
                "aligned": a}

    def unlabeled_loss(self, weak, strong, views, step):
        q = tf.stop_gradient(tf.nn.softmax(weak))
        sets = self.credal_sets(views["weak"], q, step.predictions)
        loss = losses.credal_loss(strong, sets["class"], sets["alpha"])
        mask = losses.confidence_mask(q, self.options.confidence)
        scalars = {"monitors/alpha": tf.reduce_mean(sets["alpha"]), "metrics/kld": tf.reduce_mean(loss)}
        return UnlabeledLoss(loss, mask, scalars, mean_prediction=tf.reduce_mean(q, 0))


if __name__ == "__main__":
    cssl.main(CSSL)
