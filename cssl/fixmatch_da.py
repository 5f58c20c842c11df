"""FixMatch with distribution alignment: soft, aligned pseudo-labels where the raw prediction is confident.

    python -m cssl.fixmatch_da --dataset=cifar10.3@40-1
"""
from __future__ import annotations

from dataclasses import dataclass

from libml.config import option
from libml.lazy import tf
from libml.learn import losses
from libml.learn.model import SSLModel


class FixMatchDA(SSLModel):
    """Cross-entropy of the strong view with the aligned distribution a, where max q >= tau."""

    uses_alignment = True

    @dataclass(frozen=True, kw_only=True)
    class Options(SSLModel.Options):
        """FixMatch's own hyperparameter."""

        confidence: float = option(0.95, "tau: threshold on the largest class probability of the weak view", low=0,
                                   high=1, named=True)

    def unlabeled_loss(self, weak, strong, views, step):
        """H(a, p) and [max q >= tau]."""
        q = tf.stop_gradient(tf.nn.softmax(weak))
        loss = losses.soft_cross_entropy(strong, self.aligned(q, step))
        return loss, losses.confidence_mask(q, self.options.confidence), {}


if __name__ == "__main__":
    from cssl import cli

    cli.main(FixMatchDA)
