"""MixMatch (Berthelot et al. 2019): sharpened mean guesses, mixed with the labelled images."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import LossOutput, PreFixMatchOptions, SSLModel, losses, mixing


class MixMatch(SSLModel):
    """MixUp of labelled images with weak views, whose guessed label is the sharpened mean over the views."""

    strong_labeled = property(lambda self: self.options.cta)
    views_per_image = property(lambda self: (0, self.options.K) if self.options.cta else (self.options.K, 0))

    class Options(PreFixMatchOptions):
        K: int = option(2, "weak views per unlabelled image", low=1)
        T: float = option(0.5, "temperature of the sharpening", above=0)
        beta: float = option(0.5, "of the Beta distribution of the mixing weights; 0: no mixing", low=0)
        w_match: float = option(100.0, "lambda_u: weight of the unlabelled loss after the warm-up", low=0)
        warmup_kimg: float = option(1024.0, "kimg over which that weight grows linearly", low=0)
        cta: bool = option(False, "train on strong views (CTAugment) instead of weak ones")

    def compute_losses(self, views, step):
        """H(mixed label, p) + w(t) mean_k (mixed guess_k - p_k)^2 (Algorithm 1, Eqs. 3-5)."""
        options, size = self.options, views["labeled"].shape[0]
        unlabeled = views["strong" if options.cta else "weak"]
        logits = [step.forward(y, update_statistics=False) for y in tf.split(unlabeled, options.K)]
        guess = tf.stop_gradient(losses.sharpen(sum(map(tf.nn.softmax, logits)) / options.K, options.T))

        images = tf.concat([views["labeled"], unlabeled], 0)
        targets = tf.concat([tf.one_hot(views["label"], self.num_classes), tf.tile(guess, [options.K, 1])], 0)
        images, targets = mixing.mixup(images, targets, beta=options.beta, seed=step.new_seed())
        mixed = mixing.forward_interleaved(step, images, size)
        xe = tf.reduce_mean(losses.soft_cross_entropy(mixed[:size], targets[:size]))
        match = tf.reduce_mean(losses.squared_error(tf.nn.softmax(mixed[size:]), targets[size:]))
        weight = options.w_match * step.ramp(1024 * options.warmup_kimg)
        return LossOutput(xe + weight * match, {"losses/xe": xe, "losses/xeu": match}, pseudo_labels=(guess, None))


if __name__ == "__main__":
    cssl.main(MixMatch)
