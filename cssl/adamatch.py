"""AdaMatch (Berthelot et al. 2022), in USB's form: FixMatch with a relative threshold and labels' predictions as prior.

    python -m cssl.adamatch --dataset=cifar10.3@40-1
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libml import banks, losses
from libml.config import option
from libml.lazy import tf
from libml.model import Equal, SSLModel


class AdaMatch(SSLModel):
    """Cross-entropy of the strong view with argmax a, where max a >= tau times the mean confidence with labels."""

    communicates = True

    @dataclass(frozen=True, kw_only=True)
    class Options(SSLModel.Options):
        """AdaMatch's own hyperparameters; the authors' own runs: confidence 0.9, uratio 3, wd 0.001."""

        confidence: float = option(0.95, "tau: threshold, relative to the mean confidence on labelled images", low=0,
                                   high=1, named=True)
        momentum: float = option(0.999, "decay of the averages of predictions", low=0, high=1)

    def initial_state(self):
        """Averages of the predictions on labelled and on unlabelled (zeros: none yet) images."""
        return {"p_labeled": Equal(np.full(self.num_classes, 1 / self.num_classes, np.float32)),
                "p_unlabeled": Equal(np.zeros(self.num_classes, np.float32))}

    def targets(self, labeled: tf.Tensor, q: tf.Tensor, step) -> tuple[tf.Tensor, tf.Tensor]:
        """Aligned predictions a [N, C] and mask [N], from probabilities of labelled and unlabelled weak views."""
        p_l, p_u = (banks.running_mean(step.state[name], step.mean(tf.reduce_mean(p, 0)), self.options.momentum)
                    for name, p in (("p_labeled", labeled), ("p_unlabeled", q)))
        step.new_state |= {"p_labeled": p_l, "p_unlabeled": p_u}
        tau = self.options.confidence * step.mean(tf.reduce_mean(tf.reduce_max(labeled, -1)))
        a = losses.align(q, p_data=p_l, p_model=p_u)
        return a, losses.confidence_mask(a, tau)

    def compute_losses(self, views, step):
        """H(label, p) + wu [max a >= tau mean max p(labelled)] H(argmax a, p)."""
        x, weak, strong = self.forward_together(views, step)
        labeled, q = (tf.stop_gradient(tf.nn.softmax(logits)) for logits in (x, weak))
        a, mask = self.targets(labeled, q, step)
        step.record_pseudo_labels(a, mask)
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        xeu = tf.reduce_mean(mask * losses.cross_entropy(strong, tf.argmax(a, -1)))
        return xe + self.options.wu * xeu, {"losses/xe": xe, "losses/xeu": xeu,
                                            "monitors/mask": tf.reduce_mean(mask)}


if __name__ == "__main__":
    from cssl import cli

    cli.main(AdaMatch)
