"""FixMatch (Sohn et al. 2020): hard pseudo-labels where the prediction on the weak view is confident."""
import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import Adam, Nesterov, SSLModel, ThresholdOptions, UnlabeledLoss, losses


class FixMatch(SSLModel):
    """Cross-entropy of the strong view with argmax q, where max q >= tau."""

    class Options(ThresholdOptions):  # the further ones are the paper's ablations
        optimizer: str = option("sgd", "SGD with momentum, or Adam (in the paper with --lr=0.002)",
                                choices=("sgd", "adam"))
        momentum: float = option(0.9, "beta: momentum of SGD", low=0, high=1)
        nesterov: bool = option(True, "Nesterov's form of SGD's momentum")
        beta1: float = option(0.9, "beta_1 of Adam", low=0, high=0.999999)
        beta2: float = option(0.999, "beta_2 of Adam; with 0 its epsilon is 1e-4 instead of 1e-8", low=0, high=0.999999)
        lr_decay: str = option("cosine", "the learning rate falls as a cosine, or linearly to lr_end",
                               choices=("cosine", "linear"))
        lr_end: float = option(0.02, "learning rate at the end of a linear decay", low=0)
        teacher: str = option("none", "pseudo-labels from the averaged weights, batch normalisation with moving "
                              "statistics or with those of the batch; none: from the weights",
                              choices=("none", "moving", "batch"))
        T: float = option(1.0, "temperature of the pseudo-label: softmax(w / T)", above=0)
        target: str = option("hard", "hard: label and mask from softmax(w / T); soft: softmax(w / T) is the target, "
                             "the mask is from softmax(w)", choices=("hard", "soft"))
        anchoring: str = option("weak.strong", "the view that gives the pseudo-label, and the view that is trained",
                                choices=("weak.strong", "weak.weak", "strong.strong", "strong.weak"))

    @property
    def optimizer_rule(self):
        options = self.options
        if options.optimizer == "adam":
            return Adam(options.beta1, options.beta2, 1e-8 if options.beta2 else 1e-4)
        return Nesterov(options.momentum, options.nesterov)

    def learning_rate(self, images_seen):
        if self.options.lr_decay == "cosine":
            return super().learning_rate(images_seen)
        progress = tf.cast(images_seen, tf.float32) / self.total_images
        return self.options.lr + (self.options.lr_end - self.options.lr) * progress

    def forward_together(self, views, step, outputs=None):
        """Logits of labelled views, of those that give pseudo-labels and of those that are trained."""
        guess, trained = self.options.anchoring.split(".")
        if self.options.teacher == "none":
            x, weak, strong = super().forward_together(views, step, outputs)
            logits = {"weak": weak, "strong": strong}
            return x, logits[guess], logits[trained]
        joint = step.forward(tf.concat([views["labeled"], views[trained]], 0))
        x, student = tf.split(joint, [views["labeled"].shape[0], -1])
        teacher = step.forward(views[guess], ema=True, training=self.options.teacher == "batch")
        size = views["strong"].shape[0]  # K strong views to a weak one
        return x, *(tf.tile(logits, [size // logits.shape[0], 1]) for logits in (teacher, student))

    def unlabeled_loss(self, weak, strong, views, step):
        """H(argmax q, p) and [max q >= tau] (Sec. 2.1), q sharpened by T; or H(q, p), where the mask knows no T."""
        q = tf.stop_gradient(tf.nn.softmax(weak / self.options.T))
        if self.options.target == "hard":
            return UnlabeledLoss(losses.cross_entropy(strong, tf.argmax(q, -1)),
                                 losses.confidence_mask(q, self.options.confidence))
        mask = losses.confidence_mask(tf.stop_gradient(tf.nn.softmax(weak)), self.options.confidence)
        return UnlabeledLoss(losses.soft_cross_entropy(strong, q), mask)


if __name__ == "__main__":
    cssl.main(FixMatch)
