"""MixMatch (Berthelot et al. 2019): sharpened mean guesses, mixed with the labelled images.

    python -m cssl.mixmatch --dataset=cifar10.3@40-1
"""
from dataclasses import dataclass

import tensorflow as tf

from cssl import cli
from libml import losses, mixing
from libml.options import option
from libml.ssl import ClassicOptions, SSLModel, len_static, pseudo_label_quality


class MixMatch(SSLModel):
    """MixUp of labelled images with weak views, whose guessed label is the sharpened mean over the views."""

    @dataclass(frozen=True, kw_only=True)
    class Options(ClassicOptions):
        """MixMatch's own hyperparameters, as in FixMatch's comparison; the MixMatch paper: w_match 75, beta 0.75."""

        K: int = option(2, "weak views per unlabelled image")
        T: float = option(0.5, "temperature of the sharpening")
        beta: float = option(0.5, "of the Beta distribution of the mixing weights; 0: no mixing")
        w_match: float = option(100.0, "lambda_u: weight of the unlabelled loss after the warm-up")
        warmup_kimg: float = option(1024.0, "kimg over which that weight grows linearly")

    @property
    def views_per_image(self):
        """K weak views."""
        return self.options.K, 0

    def compute_losses(self, views, step):
        """H(mixed label, p) + w(t) mean_k (mixed guess_k - p_k)^2 (Algorithm 1, Eqs. 3-5)."""
        options, size = self.options, len_static(views["labeled"])
        logits = [step.forward(y, update_statistics=False) for y in tf.split(views["weak"], options.K)]
        guess = tf.stop_gradient(losses.sharpen(sum(map(tf.nn.softmax, logits)) / options.K, options.T))

        images = tf.concat([views["labeled"], views["weak"]], 0)
        targets = tf.concat([tf.one_hot(views["label"], self.num_classes), tf.tile(guess, [options.K, 1])], 0)
        images, targets = mixing.mixup(images, targets, beta=options.beta, seed=step.new_seed())
        mixed = mixing.forward_interleaved(step, images, size)
        xe = tf.reduce_mean(losses.soft_cross_entropy(mixed[:size], targets[:size]))
        match = tf.reduce_mean(losses.squared_error(tf.nn.softmax(mixed[size:]), targets[size:]))
        weight = options.w_match * step.ramp(1024 * options.warmup_kimg)
        return xe + weight * match, {"losses/xe": xe, "losses/xeu": match, **pseudo_label_quality(guess, views)}


if __name__ == "__main__":
    cli.main(MixMatch)
