"""Measures how many image files a second are classified, against Keras's predict of one image after the other.

    python scripts/lab/bench_predict.py [--files=512] [--rounds=3] [--filters=32] [--json]

Both read the same JPEG files with Pillow and run the same network, WRN-28-2 unless told otherwise, with random weights.
The two take turns, and the best round of each counts. Keras gets fewer files, as its rate does not depend on them.
"""
import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from cssl import CSSL, RunConfig, cli


def write_files(folder: Path, count: int, side: int) -> list[Path]:
    """Writes JPEG files of smooth noise."""
    rng = np.random.default_rng(0)
    files = [folder / f"{i:05d}.jpg" for i in range(count)]
    for file in files:
        small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        small.resize((side, side), Image.Resampling.BICUBIC).save(file)
    return files


def main() -> None:
    """Prints images per second of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--keras_files", type=int, default=32)
    parser.add_argument("--side", type=int, default=64, help="of the JPEG files")
    parser.add_argument("--size", type=int, default=32, help="of the network's images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--filters", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cli.start_tensorflow()
    from libml import experiment
    from libml.data import DataFacts, sources
    from libml.results import predict

    config = RunConfig.of(CSSL, dataset="cifar10.1@40-1", filters=args.filters, repeat=args.repeat, augment="d.d.x")
    facts = DataFacts([str(c) for c in range(10)], (args.size, args.size, 3), (40, 1000), True)
    model = experiment.build(config, facts)
    classifier = predict.Classifier.of_run(experiment.Restored(config, model, facts, ""))

    def ours(files: list[Path]) -> np.ndarray:
        return predict.predict(classifier, files).logits

    def one_by_one(files: list[Path]) -> np.ndarray:
        found = []
        for file in files:
            with Image.open(file) as image:
                found.append(model.predict(sources.resize(image, args.size)[None], verbose=0))
        return np.concatenate(found)

    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), args.files, args.side)
        few = files[:args.keras_files]
        difference = float(np.abs(ours(files)[:len(few)] - one_by_one(few)).max())  # and both are warm
        best = {"predict": 0.0, "keras": 0.0}
        for _ in range(args.rounds):
            for name, function, chosen in (("keras", one_by_one, few), ("predict", ours, files)):
                started = time.perf_counter()
                function(chosen)
                best[name] = max(best[name], len(chosen) / (time.perf_counter() - started))
    result = {"images_per_s": best["predict"], "keras_images_per_s": best["keras"],
              "ratio": best["predict"] / best["keras"], "largest_difference_of_a_logit": difference}
    if args.json:
        print(json.dumps(result))
    else:
        print(f"predict {result['images_per_s']:.0f} images/s, Keras one by one {result['keras_images_per_s']:.1f}, "
              f"ratio {result['ratio']:.1f}")


if __name__ == "__main__":
    main()
