"""MixUp (Zhang et al. 2018), semi-supervised: labelled images mixed with each other, and unlabelled ones likewise."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import AdamModel, LossOutput, losses, mixing


class MixUp(AdamModel):
    """Cross-entropy of mixed labelled images, and of mixed unlabelled ones with their mixed guesses."""

    strong_labeled = property(lambda self: self.options.cta)
    views_per_image = property(lambda self: (0, 1) if self.options.cta else (1, 0))

    class Options(AdamModel.Options):
        warmup_pos: float = option(0.0, "part of the run over which the unlabelled loss's weight grows linearly", low=0,
                                   high=1)
        beta: float = option(0.5, "of the Beta distribution of the mixing weights; 0: no mixing", low=0)
        cta: bool = option(False, "train on strong views (CTAugment) instead of weak ones")

    def compute_losses(self, views, step):
        """H(Mix(label, label'), p(Mix(x, x'))) + H(Mix(q, q'), p(Mix(u, u'))), where ' reverses the batch."""
        beta, unlabeled = self.options.beta, views["strong" if self.options.cta else "weak"]
        x, target = mixing.mixup_reversed(views["labeled"], tf.one_hot(views["label"], self.num_classes), beta=beta,
                                          seed=step.new_seed())
        xe = tf.reduce_mean(losses.soft_cross_entropy(step.forward(x), target))
        guess = tf.stop_gradient(tf.nn.softmax(step.forward(unlabeled, update_statistics=False)))
        u, target = mixing.mixup_reversed(unlabeled, guess, beta=beta, seed=step.new_seed())
        xeu = tf.reduce_mean(losses.soft_cross_entropy(step.forward(u, update_statistics=False), target))
        ramp = step.ramp(self.options.warmup_pos * self.total_images)
        return LossOutput(xe + ramp * xeu, {"losses/xe": xe, "losses/xeu": xeu}, pseudo_labels=(guess, None))


if __name__ == "__main__":
    cssl.main(MixUp)
