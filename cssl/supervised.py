"""Labels alone: the baseline that every semi-supervised method must beat.

    python -m cssl.supervised --dataset=cifar10.3@40-1
"""
from libml.learn.model import SSLModel
from libml.learn.step import LossOutput


class Supervised(SSLModel):
    """Cross-entropy on the weak views of the labelled images."""

    uses_unlabeled = False

    def compute_losses(self, views, step):
        """H(label, p(weak view))."""
        xe = self.labeled_cross_entropy(views, step)
        return LossOutput(xe, {"losses/xe": xe})


if __name__ == "__main__":
    from cssl import cli

    cli.main(Supervised)
