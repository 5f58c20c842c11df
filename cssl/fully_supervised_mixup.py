"""MixUp (Zhang et al. 2018) with all labels."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import AdamModel, LossOutput, losses, mixing


class FullySupervisedMixUp(AdamModel):
    """Cross-entropy on mixtures of all training images: the number of labels in the dataset's name is ignored."""

    uses_unlabeled = False
    uses_all_labels = True
    strong_labeled = property(lambda self: self.options.cta)

    class Options(AdamModel.Options):
        wd: float = option(0.002, "decoupled weight decay: each update takes wd * lr of the kernels away", low=0,
                           named=True)
        beta: float = option(0.5, "of the Beta distribution of the mixing weights; 0: no mixing", low=0)
        cta: bool = option(False, "train on strong views (CTAugment) instead of weak ones")

    def compute_losses(self, views, step):
        """H(Mix(label, label'), p(Mix(x, x'))), where ' reverses the batch."""
        x, target = mixing.mixup_reversed(views["labeled"], tf.one_hot(views["label"], self.num_classes),
                                          beta=self.options.beta, seed=step.new_seed())
        xe = tf.reduce_mean(losses.soft_cross_entropy(step.forward(x), target))
        return LossOutput(xe, {"losses/xe": xe})


if __name__ == "__main__":
    cssl.main(FullySupervisedMixUp)
