"""Labels alone: the baseline that every semi-supervised method must beat."""
import cssl
from libml.learn import SSLModel


class Supervised(SSLModel):
    """Cross-entropy on the weak views of the labelled images."""

    uses_unlabeled = False


if __name__ == "__main__":
    cssl.main(Supervised)
