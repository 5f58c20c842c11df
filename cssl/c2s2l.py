"""C2S2L (Lienen, Demir & Hüllermeier 2023): CSSL with credal sets from conformal prediction on held-out labels."""
import numpy as np

import cssl
from libml import augment
from libml.config import option
from libml.lazy import tf
from libml.learn import Equal, LossOutput, SSLModel, losses

EPOCH = 1024  # updates


class C2S2L(SSLModel):
    """Divergence of the strong view from the set of distributions under the possibility degrees of the weak view."""

    presets = {"any": {"augment": "d.d.rac"}}

    class Options(SSLModel.Options):
        calibration: float = option(0.25, "share of the labelled images that is kept for calibration", above=0,
                                    high=0.9, named=True)
        score: str = option("diff", "nonconformity: the best other class's probability minus (diff) or over (prop) "
                            "that of the class", choices=("diff", "prop"))
        gamma: float = option(0.1, "gamma: added to the denominator of the score prop", low=0)
        refresh: int = option(10, "updates between new calibrations", low=1)
        normalize: str = option("all", "largest possibility becomes 1: by dividing all by it, or by raising it alone",
                                choices=("all", "largest"))

    def initial_state(self):
        """The network as it was at the last calibration, and the scores of the calibration images, sorted."""
        if not len(self.calibration_classes):
            raise ValueError("C2S2L got no calibration images: give its class calibration=(images, classes).")
        network = [*self.network.trainable_variables, *self.network.non_trainable_variables]
        return {**{f"snapshot_{i}": Equal(v.numpy()) for i, v in enumerate(network)},
                "scores": np.full(len(self.calibration_classes), np.inf, np.float32)}

    def snapshot(self, step):
        """The state, new at epochs' starts and every `refresh` updates."""
        update = step.images_seen // self.options.batch % EPOCH
        due = (update == 0) | (update % self.options.refresh == self.options.refresh - 1)
        due |= tf.math.is_inf(step.state["scores"][0])  # the first calibration was lost, as float16 loses updates
        network = [*step.weights, *step.statistics]
        state = {f"snapshot_{i}": tf.stop_gradient(tf.where(due, new, step.state[f"snapshot_{i}"]))
                 for i, new in enumerate(network)}
        scores = tf.cond(due, lambda: self.calibrate(state), lambda: step.state["scores"])
        return state | {"scores": tf.stop_gradient(scores)}

    def logits(self, images, state):
        """Of float images, from the snapshot [N, C]."""
        size, rest = len(self.network.trainable_variables), len(self.network.non_trainable_variables)
        network = [state[f"snapshot_{i}"] for i in range(size + rest)]
        return tf.stop_gradient(self.infer(images, values=(network[:size], network[size:])))

    def calibrate(self, state, chunk=256):
        """Nonconformity of the calibration images with their true classes [n], sorted; some images at a time."""
        size = len(self.calibration_classes)
        rows = np.resize(np.arange(size), (-(-size // chunk), min(chunk, size)))  # the last chunk is filled up
        images = augment.to_float(tf.convert_to_tensor(self.calibration_images))  # GPUs gather no bytes
        logits = tf.map_fn(lambda part: self.logits(part, state), tf.gather(images, rows),
                           fn_output_signature=tf.float32)
        p = tf.nn.softmax(tf.reshape(logits, [-1, self.num_classes])[:size])
        return tf.sort(tf.gather(self.nonconformity(p), self.calibration_classes, batch_dims=1))

    def nonconformity(self, p):
        """How badly each class fits [N, C]: max_{j != k} p_j - p_k, or max_{j != k} p_j / (p_k + gamma)."""
        best, index = tf.math.top_k(p, 2)
        first = tf.one_hot(index[:, 0], self.num_classes, on_value=True, off_value=False)
        other = tf.where(first, best[:, 1:], best[:, :1])
        return other - p if self.options.score == "diff" else other / (p + (self.options.gamma + 1e-5))

    def possibility(self, p, scores):
        """pi_k [N, C]: the share of calibration scores, and this one, that are at least score_k; the largest made 1."""
        found, size = tf.reshape(self.nonconformity(p), [-1]), scores.shape[0]
        fewer = tf.reshape(tf.searchsorted(scores, found), tf.shape(p))
        pi = tf.cast(size - fewer + 1, tf.float32) / (size + 1)
        if self.options.normalize == "all":
            return pi / tf.reduce_max(pi, -1, keepdims=True)
        return tf.maximum(pi, tf.one_hot(tf.argmax(pi, -1), self.num_classes))

    def credal_sets(self, images, q):
        """By the last calibration; before the first one all classes are possible."""
        state = {name: tf.convert_to_tensor(v) for name, v in self.method_state.items()}
        return {"possibility": self.possibility(tf.nn.softmax(self.logits(images, state)), state["scores"])}

    def compute_losses(self, views, step):
        """KL(label || p) + wu min_{t in Q} KL(t || p(strong)), Q from the weak view's possibility degrees."""
        state = self.snapshot(step)
        weak = self.logits(views["weak"], state)
        pi = tf.tile(self.possibility(tf.nn.softmax(weak), state["scores"]), [self.options.K, 1])

        size = views["labeled"].shape[0]
        logits = step.forward(tf.concat([views["labeled"], views["strong"]], 0))
        label = tf.one_hot(views["label"], self.num_classes)
        xe = tf.reduce_mean(losses.clipped_kl(label, tf.nn.softmax(logits[:size])))
        xeu = tf.reduce_mean(losses.possibility_loss(logits[size:], pi))
        scalars = {"losses/xe": xe, "losses/xeu": xeu, "monitors/possible": tf.reduce_mean(tf.reduce_sum(pi, -1))}
        return LossOutput(xe + self.options.wu * xeu, scalars, state, (weak, None))


if __name__ == "__main__":
    cssl.main(C2S2L)
