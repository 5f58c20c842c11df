"""CRMatch (Fan et al. 2021): FixMatch with features that tell the strong view from the weak one, and turns to guess."""
import cssl
from libml import networks
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, SSLModel, ThresholdOptions, losses, mixing


class CRMatch(SSLModel):
    """Cross-entropy with argmax q where max q >= tau, angles between features of both views, quarter turns."""

    weak_again = True  # to be turned
    presets = {"features": {"w_rot": 0.0}}  # which cannot be

    class Options(ThresholdOptions):
        w_distance: float = option(1.0, "weight of the likeness of strong and weak features", low=0)
        w_rot: float = option(1.0, "weight of the rotation loss", low=0)

    def with_heads(self, network):
        """A vector of the whole feature map, as long as the map has channels, and four quarter turns to tell apart."""
        channels = getattr(network, "map_shape", (1,))[-1]  # Heads says what a network without a map lacks
        return networks.Heads(network, {"vector": networks.MapVector(channels, self.seed),
                                        "rotation": networks.Projection(4, seed=self.seed, normalize=False)}, self.seed)

    def compute_losses(self, views, step):
        """H(label, p) + wu mask H(argmax q, p) + w_distance mask max(0, cos(e_s, e_w)) + w_rot H(turn, r)."""
        options = self.options
        (x, _), (weak, e_weak), (strong, e_strong) = self.forward_together(views, step, ("logits", "vector"))
        q = tf.stop_gradient(tf.nn.softmax(weak))
        mask = losses.confidence_mask(q, options.confidence)
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        xeu = tf.reduce_mean(mask * losses.cross_entropy(strong, tf.argmax(q, -1)))
        cosine = tf.reduce_sum(tf.math.l2_normalize(e_strong, -1) * tf.math.l2_normalize(e_weak, -1), -1)
        distance = tf.reduce_mean(mask * tf.nn.relu(cosine))
        turned, turns = mixing.rotate_quarters(tf.tile(views["weak_again"], [4, 1, 1, 1]))
        rotation, = step.forward(turned, outputs=("rotation",), update_statistics=False)
        rot = tf.reduce_mean(losses.cross_entropy(rotation, turns))
        scalars = {"losses/xe": xe, "losses/xeu": xeu, "losses/distance": distance, "losses/rot": rot}
        return LossOutput(xe + options.wu * xeu + options.w_distance * distance + options.w_rot * rot, scalars,
                          pseudo_labels=(weak, mask))


if __name__ == "__main__":
    cssl.main(CRMatch)
