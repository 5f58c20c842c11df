"""FlexMatch (Zhang et al. 2021): FixMatch whose threshold for a class is the lower, the less the class is learned."""
import numpy as np

import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import SSLModel, UnlabeledLoss, banks, losses


class FlexMatch(SSLModel):
    """Cross-entropy of the strong view with y = argmax q, where max q >= tau beta_y / (2 - beta_y)."""

    communicates = True

    class Options(SSLModel.Options):
        confidence: float = option(0.95, "tau: threshold for the best learned class", low=0, high=1, named=True)
        thresh_warmup: bool = option(True, "images without a confident prediction so far count as one more class")

    def initial_state(self):
        """The class of each unlabelled image when it last was confident (-1: never), and how many have which."""
        if not self.num_unlabeled:
            raise ValueError("FlexMatch keeps a class per unlabelled image: give set_sizes=(labelled, unlabelled).")
        return {"chosen": np.full(self.num_unlabeled, -1, np.int32), "counts": np.zeros(self.num_classes, np.int32)}

    def learned(self, counts):
        counts, total = tf.cast(counts, tf.float32), float(self.num_unlabeled)
        most = tf.reduce_max(counts)
        if self.options.thresh_warmup:
            most = tf.maximum(most, total - tf.reduce_sum(counts))
        return tf.math.divide_no_nan(counts, most)

    def unlabeled_loss(self, weak, strong, views, step):
        """H(y, p) and [max q >= tau beta_y / (2 - beta_y)], beta from before this batch."""
        q = tf.stop_gradient(tf.nn.softmax(weak))
        y, c = tf.argmax(q, -1, tf.int32), tf.reduce_max(q, -1)
        beta = self.learned(step.state["counts"])
        thresholds = self.options.confidence * beta / (2 - beta)
        mask = tf.cast(c >= tf.gather(thresholds, y), tf.float32)

        size = views["unlabeled_index"].shape[0]  # weak logits are repeated for further strong views
        index, new, sure = step.gather([views["unlabeled_index"], y[:size], c[:size] >= self.options.confidence])
        last = banks.last_occurrence(index, sure)
        old = tf.gather(step.state["chosen"], index)
        new = tf.where(last >= 0, tf.gather(new, tf.maximum(last, 0)), old)
        moved = tf.cast(last == tf.range(last.shape[0]), tf.int32)[:, tf.newaxis]  # each image once
        change = tf.one_hot(new, self.num_classes, dtype=tf.int32) - tf.one_hot(old, self.num_classes, dtype=tf.int32)
        state = {"chosen": tf.tensor_scatter_nd_update(step.state["chosen"], index[:, tf.newaxis], new),
                 "counts": step.state["counts"] + tf.reduce_sum(moved * change, 0)}
        scalars = {"monitors/threshold": tf.reduce_mean(thresholds)}
        return UnlabeledLoss(losses.cross_entropy(strong, y), mask, scalars, state)


if __name__ == "__main__":
    cssl.main(FlexMatch)
