"""EnAET (Wang et al. 2020): MixMatch whose network must also let decoders recover how an image was transformed."""
import math

import cssl
from libml import augment, networks
from libml.config import option
from libml.lazy import tf
from libml.learn import AdamModel, LossOutput, Nesterov, losses, mixing

WEIGHTS = {"projective": 10.0, "affine": 7.5, "similarity": 5.0, "euclidean": 2.0, "ccbs": 0.5}  # lambda_k


class EnAET(AdamModel):
    """MixMatch, plus the errors of five decoders of transformations and the divergence of transformed images."""

    views_per_image = (2, 0)
    needs_pixels = True
    presets = {"cifar100": {"w_match": 150.0}, "stl10": {"w_match": 50.0, "warmup_pos": 500 / 1024},
               **dict.fromkeys(("svhn", "svhn_noextra"), {"w_match": 250.0})}  # the authors'

    class Options(AdamModel.Options):
        batch: int = option(128, "B: labelled images per update", low=1, named=True)
        warmup_pos: float = option(50 / 1024, "part of the run over which the weight of the guesses grows linearly",
                                   low=0, high=1)
        T: float = option(0.5, "temperature of the sharpening", above=0)
        beta: float = option(0.75, "of the Beta distribution of a batch's mixing weight; 0: no mixing", low=0)
        w_match: float = option(75.0, "weight of the mixed guesses after the warm-up; CIFAR-100 150, SVHN 250, STL-10 "
                                "50", low=0)
        w_aet: float = option(1.0, "factor of the decoders' weights 10, 7.5, 5, 2, 0.5, times t up to t = 0.1", low=0)
        w_kl: float = option(1.0, "weight of the transformed images' divergence from the guess", low=0)
        mosaic: bool = option(True, "a third view, with a square blurred to its mean colour")
        decoder_lr: float = option(0.1, "learning rate of the decoders; falls in cosines by a tenth each", above=0)
        decoder_wd: float = option(0.0005, "weight decay of the decoders: factor of 0.5 ||W||^2 over all weights",
                                   low=0)

    def with_heads(self, network):
        from libml.augment.transformations import NUMBERS  # needs TensorFlow

        return networks.Decoders(network, NUMBERS, self.seed)

    def weight_groups(self):
        decoders = [v for decoder in self.network.decoders.values() for v in decoder.trainable_variables]
        return {"network": self.group(self.network.network.trainable_variables, decays=lambda v: True),
                "decoders": self.group(decoders, decays=lambda v: True)._replace(
                    rule=Nesterov(), decoupled=False, learning_rate=self.decoder_rate,
                    wd=self.options.decoder_wd)}

    def decoder_rate(self, images_seen):
        """Half a cosine down to a tenth over each of 500, 500 and 300 epochs, of which the run has 1024."""
        epoch = 1024 * tf.cast(images_seen, tf.float32) / self.total_images
        start = tf.where(epoch < 500, 0.0, tf.where(epoch < 1000, 500.0, 1000.0))
        part = (epoch - start) / tf.where(epoch < 1000, 500.0, 300.0)
        top = self.options.decoder_lr * 10 ** (-start / 500)
        return top * (0.1 + 0.45 * (1 + tf.cos(math.pi * tf.minimum(part, 1.0))))

    def on_device(self, function):
        """A function of bytes, compiled on a GPU as its views are: single kernels have their integers on the host."""
        compiled = self.augmenter is not None and self.augmenter.on_gpu and self.augmenter.jit_compile
        return tf.function(function, jit_compile=True, autograph=False) if compiled else function

    def compute_losses(self, views, step):
        """H(mixed label, p) + w(t) (mixed guess - p)^2 + sum_k w_k(t) (target_k - found_k)^2 + w_kl KL(guess || p)."""
        from libml.augment import transformations

        options, size = self.options, views["labeled"].shape[0]
        first, second = tf.split(views["weak"], 2)
        pixels = augment.to_uint8(first)  # transformations are of bytes
        # Passes that the guess needs give gradients to the other terms: the same batches are not run twice.
        logits, original = step.forward(first, outputs=("logits", "map"), update_statistics=False)
        images, predictions = [first, second], [logits, step.forward(second, update_statistics=False)]
        transformed = []
        if options.mosaic:
            centre = mixing.uniform([pixels.shape[0], 2], step.new_seed())
            images.append(augment.to_float(self.on_device(transformations.mosaic)(pixels, centre)))
            transformed.append(step.forward(images[-1], update_statistics=False))
            predictions.append(transformed[-1])
        mean = sum(map(tf.nn.softmax, predictions)) / len(predictions)
        guess = tf.stop_gradient(losses.sharpen(mean, options.T))

        errors = {}
        for name, (changed, target) in self.on_device(transformations.transform)(pixels, step.new_seed()).items():
            logits, found = step.forward(augment.to_float(changed), outputs=("logits", name), original=original,
                                         update_statistics=False)
            transformed.append(logits)
            errors[name] = tf.reduce_mean(tf.math.squared_difference(found, target))
        kl = tf.add_n([tf.reduce_mean(losses.kl_divergence(guess, logits)) for logits in transformed])
        kl /= len(transformed)

        targets = tf.concat([tf.one_hot(views["label"], self.num_classes), tf.tile(guess, [len(images), 1])], 0)
        mixed, targets = mixing.mixup(tf.concat([views["labeled"], *images], 0), targets, beta=options.beta,
                                      seed=step.new_seed(), one_weight=True)
        logits = mixing.forward_interleaved(step, mixed, size)
        xe = tf.reduce_mean(losses.soft_cross_entropy(logits[:size], targets[:size]))
        match = tf.reduce_mean(losses.squared_error(tf.nn.softmax(logits[size:]), targets[size:]))
        ramp, time = step.ramp(options.warmup_pos * self.total_images), step.ramp(self.total_images)
        aet = sum(WEIGHTS[name] * tf.minimum(time, 0.1) * error for name, error in errors.items())
        scalars = {"losses/xe": xe, "losses/xeu": match, "losses/kl": kl, "losses/aet": aet,
                   **{f"losses/{name}": error for name, error in errors.items()}}
        return LossOutput(xe + options.w_match * ramp * match + options.w_aet * aet + options.w_kl * kl, scalars,
                          pseudo_labels=(guess, None))


if __name__ == "__main__":
    cssl.main(EnAET)
