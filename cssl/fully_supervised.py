"""All labels: the upper bound of every semi-supervised method.

    python -m cssl.fully_supervised --dataset=cifar10.3@40-1
"""
import cssl
from libml.learn import LossOutput, SSLModel


class FullySupervised(SSLModel):
    """Cross-entropy on the weak views of all training images: the number of labels in the dataset's name is ignored."""

    uses_unlabeled = False
    uses_all_labels = True

    def compute_losses(self, views, step):
        """H(label, p(weak view))."""
        xe = self.labeled_cross_entropy(views, step)
        return LossOutput(xe, {"losses/xe": xe})


if __name__ == "__main__":
    cssl.main(FullySupervised)
