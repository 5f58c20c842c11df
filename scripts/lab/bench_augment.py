"""Measures augmentation: images per second of the full strong view in the graph against a plain Pillow loop.

    python scripts/lab/bench_augment.py            # a table, about a minute on one core
    python scripts/lab/bench_augment.py --json     # one JSON object

Both do the same work on the same images: mirror, shift, CTAugment policy of depth 2, cutout, float32. The graph also
draws its random numbers, Pillow gets them for free. The contenders take turns, and the best of the rounds counts.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

from cssl import cli
from cssl.program import exit_on_user_error

cli.start_tensorflow()  # quietly, before anything else does

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from libml import data  # noqa: E402
from libml.augment import OPS, Augmenter, apply, pillow_apply  # noqa: E402
from libml.errors import UserError  # noqa: E402


def _images(n: int, size: int, data_dir: str) -> tuple[np.ndarray, str]:
    """CIFAR-10 if it is there (and fits), else smooth random pictures."""
    if size == 32:
        try:
            return np.asarray(data.load("cifar10.0@40-1", data_dir).images[:n]), "cifar10"
        except UserError as error:
            print(f"using random images: {error}", file=sys.stderr)
    coarse = np.random.default_rng(0).integers(0, 256, (n, 5, 5, 3), dtype=np.uint8)
    return tf.cast(tf.image.resize(coarse, [size, size]), tf.uint8).numpy(), "random"


def _best(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest round of each, rounds interleaved so that a busy machine is unfair to all alike."""
    best = dict.fromkeys(contenders, float("inf"))
    for call in contenders.values():
        call()  # compile, fill caches
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="threads of TensorFlow; Pillow always has one")
    parser.add_argument("--images", type=int, default=448, help="batch size")
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of which the best counts")
    parser.add_argument("--data_dir", default=cli.default_data_dir(), help="where TFDS keeps CIFAR-10")
    parser.add_argument("--no_ops", action="store_true", help="skip the times of single operations")
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)

    images, source = _images(args.images, args.size, args.data_dir)
    n, tensor = len(images), tf.constant(images)
    settings = dict(image_shape=images.shape[1:], mirror=True, shift=args.size // 8)
    augmenter = Augmenter("d.d.d", **settings)
    plain = Augmenter("d.d.d", jit_compile=False, **settings)
    seed = tf.constant([0, 0])
    samples = augmenter.sample_strong(n, seed)
    strong, strong_plain = tf.function(augmenter.strong, autograph=False), tf.function(plain.strong)
    assert np.array_equal(strong(tensor, seed), augmenter.strong_reference(images, samples)), "graph and Pillow differ"
    best = _best({
        "pillow": lambda: augmenter.strong_reference(images, samples),
        "graph": lambda: strong(tensor, seed).numpy(),
        "graph without XLA": lambda: strong_plain(tensor, seed).numpy(),
    }, args.rounds)
    result = {
        "images": n, "shape": list(images.shape[1:]), "source": source, "threads": args.threads,
        "pillow_images_per_s": round(n / best["pillow"], 1),
        "graph_images_per_s": round(n / best["graph"], 1),
        "ratio": round(best["pillow"] / best["graph"], 2),
        "graph_without_xla_images_per_s": round(n / best["graph without XLA"], 1),
        "ratio_without_xla": round(best["pillow"] / best["graph without XLA"], 2),
        "op_us_per_image": {},
    }
    rng = np.random.default_rng(0)
    for name, op in OPS.items() if not args.no_ops else ():
        params = rng.random((n, max(op.parameters, 1)), dtype=np.float32)
        graph = tf.function(lambda x, p, name=name: apply(name, x, p), jit_compile=True, autograph=False)
        times = _best({"pillow": lambda: pillow_apply(name, images, params),  # noqa: B023 - called at once
                       "graph": lambda: graph(tensor, params).numpy()}, max(args.rounds // 3, 1))  # noqa: B023
        result["op_us_per_image"][name] = {key: round(1e6 * value / n, 2) for key, value in times.items()}

    if args.json:
        print(json.dumps(result))
        return
    print(f"strong view of {n} {source} images, {'x'.join(map(str, images.shape[1:]))}, {args.threads} thread(s)")
    print(f"  Pillow loop        {result['pillow_images_per_s']:>10.0f} images/s")
    print(f"  graph              {result['graph_images_per_s']:>10.0f} images/s  {result['ratio']:.1f} x")
    print(f"  graph without XLA  {result['graph_without_xla_images_per_s']:>10.0f} images/s  "
          f"{result['ratio_without_xla']:.1f} x")
    for name, times in result["op_us_per_image"].items():
        print(f"  {name:16s} Pillow {times['pillow']:7.1f} us/image   graph {times['graph']:7.1f} us/image")


if __name__ == "__main__":
    exit_on_user_error(main)
