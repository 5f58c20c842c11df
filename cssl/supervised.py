"""Labels alone: the baseline that every semi-supervised method must beat.

    python -m cssl.supervised --dataset=cifar10.3@40-1
"""
import tensorflow as tf

from cssl import cli
from libml import losses
from libml.ssl import SSLModel


class Supervised(SSLModel):
    """Cross-entropy on the weak views of the labelled images."""

    uses_unlabeled = False

    def compute_losses(self, views, step):
        """H(label, p(weak view))."""
        xe = tf.reduce_mean(losses.cross_entropy(step.forward(views["labeled"]), views["label"]))
        return xe, {"losses/xe": xe}


if __name__ == "__main__":
    cli.main(Supervised)
