"""Labels alone: the baseline that every semi-supervised method must beat.

    python -m cssl.supervised --dataset=cifar10.3@40-1
"""
import cssl
from libml.learn import LossOutput, SSLModel


class Supervised(SSLModel):
    """Cross-entropy on the weak views of the labelled images."""

    uses_unlabeled = False

    def compute_losses(self, views, step):
        """H(label, p(weak view))."""
        xe = self.labeled_cross_entropy(views, step)
        return LossOutput(xe, {"losses/xe": xe})


if __name__ == "__main__":
    cssl.main(Supervised)
