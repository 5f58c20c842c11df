"""Writes a run's averaged model, calibrated, in forms that need TensorFlow alone.

    cssl-export RUN -o DIR [--temperature=1] [--onnx] [--force]

DIR gets saved_model/ (signatures images and bytes), model.keras, model.tflite, classes.json and export.json: class
names, temperature, and scores before and after temperature scaling. Every file is run and compared with the run first;
DIR appears when all is well, and nothing in it is overwritten.
"""
from __future__ import annotations

from pathlib import Path

import cssl
from cssl import cli, tools
from libml.results.metrics import METRICS, WHERE


def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("run", help="run folder, or a checkpoint in it")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder that is made")
    parser.add_argument("--temperature", type=float, help="instead of one fitted on the validation images; 1: none")
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too; needs the package tf2onnx")
    parser.add_argument("--force", action="store_true", help="replace an older export")
    parser.add_argument("--data_dir", default="", help="folder of the TFDS datasets; default: that of the run")
    args = parser.parse_args()
    cli.start_tensorflow()
    described = cssl.open(args.run, data_dir=args.data_dir).export(
        args.output, temperature=args.temperature, onnx=args.onnx, force=args.force)
    tools.show(f"{described['method']} on {described['dataset']}, {described['updates']} updates, "
               f"{len(described['class_names'])} classes; {described['calibration']}")
    if described["scores"]:
        print(f"{'':<22}" + "".join(f"{metric.title:>14}" for metric in METRICS.values()))
    for part, by_time in described["scores"].items():
        for when, values in by_time.items():
            print(f"{WHERE.get(part, part)}, {when}".ljust(22) + "".join(
                f"{values[name]:>14.{metric.digits}f}" for name, metric in METRICS.items()))
    for name, difference in described["largest_difference_of_a_probability"].items():
        print(f"{name:<14} probabilities within {difference:.1g} of the run's")
    tools.show(args.output)


if __name__ == "__main__":
    tools.exit_on_user_error(main)
