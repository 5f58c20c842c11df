"""FreeMatch (Wang et al. 2023): thresholds that follow the model's own confidence, and fairness between classes."""
import numpy as np

import cssl
from libml.config import option
from libml.lazy import tf
from libml.learn import Equal, LossOutput, SSLModel, banks, losses


class FreeMatch(SSLModel):
    """Cross-entropy of the strong view with y = argmax q, where max q >= tau p_y / max p; tau, p moving averages."""

    communicates = True
    presets = dict.fromkeys(("svhn", "svhn_noextra"), {"tau_max": 0.95})  # USB's

    class Options(SSLModel.Options):
        momentum: float = option(0.999, "lambda: decay of the averages of confidence and predictions", low=0, high=1)
        w_fair: float = option(0.01, "w_f: weight of the fairness loss", low=0, named=True)
        tau_max: float = option(1.0, "largest threshold; 0.95 for SVHN", low=0, high=1)

    def initial_state(self):
        """Averages of confidence (tau), of predictions (p) and of the histogram of predicted classes (h)."""
        uniform = np.full(self.num_classes, 1 / self.num_classes, np.float32)
        return {"tau": Equal(uniform[0]), "p": Equal(uniform), "h": Equal(uniform)}

    def averages(self, q, step):
        """tau, p and h with this batch; tau goes on from its bound."""
        batch = {"tau": tf.reduce_max(q, -1), "p": q, "h": tf.one_hot(tf.argmax(q, -1), self.num_classes)}
        means = step.mean({name: tf.reduce_mean(values, 0) for name, values in batch.items()})
        new = {name: banks.running_mean(step.state[name], mean, self.options.momentum) for name, mean in means.items()}
        return new | {"tau": tf.minimum(new["tau"], self.options.tau_max)}

    def thresholds(self, state):
        return state["tau"] * state["p"] / tf.reduce_max(state["p"])

    def fairness(self, strong, mask, state, step):
        """sum_k A_k log B_k, A from p / h, B from the same of the strong views that count."""
        def balanced(p, h):
            ratio = tf.math.divide_no_nan(p, h)
            return tf.math.divide_no_nan(ratio, tf.reduce_sum(ratio))

        p = tf.nn.softmax(strong)
        hits = tf.one_hot(tf.argmax(p, -1), self.num_classes)
        weight = mask[:, tf.newaxis]
        sums = [tf.reduce_sum(weight * x, 0) for x in (p, hits)]
        count, *sums = step.mean([tf.reduce_sum(mask), *sums])
        mean, histogram = (tf.math.divide_no_nan(x, count) for x in sums)
        target = balanced(state["p"], state["h"])
        loss = tf.reduce_sum(target * tf.math.log(balanced(mean, histogram) + 1e-12))
        return tf.where(count > 0, loss, 0.0)

    def compute_losses(self, views, step):
        """H(label, p) + wu [max q >= threshold_y] H(y, p) + w_fair fairness."""
        x, weak, strong = self.forward_together(views, step)
        q = tf.stop_gradient(tf.nn.softmax(weak))
        y = tf.argmax(q, -1)
        state = self.averages(q, step)
        thresholds = self.thresholds(state)
        mask = tf.cast(tf.reduce_max(q, -1) >= tf.gather(thresholds, y), tf.float32)
        xe = tf.reduce_mean(losses.cross_entropy(x, views["label"]))
        xeu = tf.reduce_mean(mask * losses.cross_entropy(strong, y))
        fair = self.fairness(strong, mask, state, step)
        scalars = {"losses/xe": xe, "losses/xeu": xeu, "losses/fair": fair,
                   "monitors/threshold": tf.reduce_mean(thresholds)}
        return LossOutput(xe + self.options.wu * xeu + self.options.w_fair * fair, scalars, state, (weak, mask))


if __name__ == "__main__":
    cssl.main(FreeMatch)
