"""ReMixMatch (Berthelot et al. 2020): MixMatch with aligned guesses for strong views, and rotations."""
import numpy as np

import cssl
from libml import networks
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, PreFixMatchOptions, SSLModel, losses, mixing


class ReMixMatch(SSLModel):
    """MixUp of labelled, weak and strong views with aligned, sharpened guesses; two more losses of a strong view."""

    uses_alignment = True
    strong_labeled = True
    presets = {"40 labels": {"K": 1, "w_rot": 2.0, "warmup_kimg": 8192.0},  # Sohn et al. 2020
               "features": {"w_rot": 0.0}}  # nothing can be turned

    class Options(PreFixMatchOptions):
        K: int = option(8, "strong views per unlabelled image", low=1)
        T: float = option(0.5, "temperature of the sharpening", above=0)
        beta: float = option(0.75, "of the Beta distribution of the mixing weights; 0: no mixing", low=0)
        w_match: float = option(1.5, "lambda_u: weight of the mixed unlabelled loss after the warm-up", low=0)
        w_kl: float = option(0.5, "lambda_u1: weight of the unmixed strong view's loss after the warm-up", low=0)
        w_rot: float = option(0.5, "lambda_r: weight of the rotation loss", low=0)
        warmup_kimg: float = option(1024.0, "kimg over which w_match and w_kl grow linearly", low=0)
        use_dm: bool = option(True, "whether guesses are aligned")
        use_xe: bool = option(True, "whether the mixed unlabelled loss is a cross-entropy, or a squared error")

    def with_heads(self, network):
        return networks.Heads(network, {"rotation": 4}, self.seed)

    def initial_state(self):
        return {"p_data": np.full(self.num_classes, 1 / self.num_classes, np.float32)}

    def compute_losses(self, views, step):
        """H(mixed label, p) + w(t) (w_match H(mixed guess, p) + w_kl H(guess, p(s))) + w_rot H(turn, r) (Sec. 3)."""
        options, size = self.options, views["labeled"].shape[0]
        label = tf.one_hot(views["label"], self.num_classes)
        p_data = step.state["p_data"]

        q = tf.stop_gradient(tf.nn.softmax(step.forward(views["weak"], update_statistics=False)))
        prior = None if options.p_unlabeled else p_data / tf.reduce_sum(p_data)
        aligned = self.aligned(q, step.predictions, prior)
        guess = losses.sharpen(aligned if options.use_dm else q, options.T)

        images = tf.concat([views["labeled"], views["weak"], views["strong"]], 0)
        targets = tf.concat([label, tf.tile(guess, [1 + options.K, 1])], 0)
        images, targets = mixing.mixup(images, targets, beta=options.beta, seed=step.new_seed())
        logits = mixing.forward_interleaved(step, images, size)
        mixed = losses.soft_cross_entropy(logits, targets)
        if not options.use_xe:
            mixed = tf.concat([mixed[:size], losses.squared_error(tf.nn.softmax(logits[size:]), targets[size:])], 0)
        xe, match = tf.reduce_mean(mixed[:size]), tf.reduce_mean(mixed[size:])

        strong = views["strong"][:views["weak"].shape[0]]  # the first of K
        kl = tf.reduce_mean(losses.soft_cross_entropy(step.forward(strong, update_statistics=False), guess))
        turned, turns = mixing.rotate_quarters(strong)
        rotation, = step.forward(turned, outputs=("rotation",), update_statistics=False)
        rot = tf.reduce_mean(losses.cross_entropy(rotation, turns))
        ramp = step.ramp(1024 * options.warmup_kimg)
        return LossOutput(xe + ramp * (options.w_match * match + options.w_kl * kl) + options.w_rot * rot,
                          {"losses/xe": xe, "losses/xeu": match, "losses/kl": kl, "losses/rot": rot},
                          {"p_data": p_data + 0.001 * (tf.reduce_mean(label, 0) - p_data)}, (guess, None),
                          tf.reduce_mean(q, 0))


if __name__ == "__main__":
    cssl.main(ReMixMatch)
