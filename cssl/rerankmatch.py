"""ReRankMatch (Tran, Kang & Kim 2021), a reconstruction: FixMatch with a ranking of image representations."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, SSLModel, ThresholdOptions, losses


class ReRankMatch(SSLModel):
    """FixMatch's loss, and BatchMean triplet losses of labelled images and of confident strong views."""

    class Options(ThresholdOptions):
        w_rank: float = option(1.0, "lambda_r: weight of the two ranking losses", low=0, named=True)
        margin: float = option(0.5, "m: by which other classes should be farther than the own", low=0)
        rank_on: str = option("embedding", "what is ranked", choices=("embedding", "logits"))

    def compute_losses(self, views, step):
        """H(label, p) + wu mask H(argmax q, p) + w_rank (R(labelled) + R(confident strong)); each replica's own."""
        options = self.options
        (x, *labeled), (weak, *_), (strong, *ranked) = self.forward_together(views, step, ("logits", "embedding"))
        q = tf.stop_gradient(tf.nn.softmax(weak))
        y, mask = tf.argmax(q, -1), losses.confidence_mask(q, options.confidence)
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        xeu = tf.reduce_mean(mask * losses.cross_entropy(strong, y))
        vectors = (x, strong) if options.rank_on == "logits" else (labeled[0], ranked[0])
        rank = losses.batch_mean_triplet(vectors[0], views["label"], tf.ones_like(x[:, 0]), options.margin)
        rank += losses.batch_mean_triplet(vectors[1], y, mask, options.margin)
        scalars = {"losses/xe": xe, "losses/xeu": xeu, "losses/rank": rank}
        return LossOutput(xe + options.wu * xeu + options.w_rank * rank, scalars, pseudo_labels=(weak, mask))


if __name__ == "__main__":
    cssl.main(ReRankMatch)
