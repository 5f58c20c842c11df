"""FixMatch (Sohn et al. 2020): hard pseudo-labels where the prediction on the weak view is confident.

    python -m cssl.fixmatch --dataset=cifar10.3@40-1
"""
from __future__ import annotations

from dataclasses import dataclass

from libml import losses
from libml.config import option
from libml.lazy import tf
from libml.model import SSLModel


class FixMatch(SSLModel):
    """Cross-entropy of the strong view with argmax q, where max q >= tau."""

    @dataclass(frozen=True, kw_only=True)
    class Options(SSLModel.Options):
        """FixMatch's own hyperparameter."""

        confidence: float = option(0.95, "tau: threshold on the largest class probability of the weak view", low=0,
                                   high=1, named=True)

    def unlabeled_loss(self, weak, strong, views, step):
        """H(argmax q, p) and [max q >= tau] (Sec. 2.1)."""
        q = tf.stop_gradient(tf.nn.softmax(weak))
        loss = losses.cross_entropy(strong, tf.argmax(q, -1))
        return loss, losses.confidence_mask(q, self.options.confidence), {}


if __name__ == "__main__":
    from cssl import cli

    cli.main(FixMatch)
