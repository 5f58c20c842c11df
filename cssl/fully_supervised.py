"""All labels: the upper bound of every semi-supervised method."""
import cssl
from libml.learn import SSLModel


class FullySupervised(SSLModel):
    """Cross-entropy on the weak views of all training images: the number of labels in the dataset's name is ignored."""

    uses_unlabeled = False
    uses_all_labels = True


if __name__ == "__main__":
    cssl.main(FullySupervised)
