"""Downloads and prepares datasets, decodes them once, and says where everything went. Safe to repeat.

    cssl-data cifar10 svhn --data_dir=/big/disk

Cost: CIFAR-10 170 MB and a minute; STL-10 2.6 GB and 2.9 GB decoded; SVHN with extra 1.5 GB and 1.9 GB decoded.
"""
import logging
from pathlib import Path

from cssl import cli, tools
from libml.data.names import DATASETS
from libml.errors import UserError

NAMES = [name for name, dataset in DATASETS.items() if dataset.tfds_name]


def prepare(name: str, data_dir: Path) -> None:
    """Downloads one dataset with TFDS unless it is there, and fills the cache of decoded images."""
    from libml.data import sources

    tfds_name = DATASETS[name].tfds_name
    if sources.tfds_version_dir(tfds_name, data_dir) is None:
        import tensorflow_datasets as tfds

        print(f"{name}: downloading and preparing {tfds_name} into {data_dir}", flush=True)
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it says each of its attempts; what fails is said below
        try:
            tfds.builder(tfds_name, data_dir=data_dir).download_and_prepare()
        except Exception as error:  # TFDS passes on whatever its downloader, parser or file system raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"{name} could not be downloaded to {data_dir} ({reason}). Check the network and the "
                            "folder and start again, or copy a prepared TFDS folder there from another "
                            "machine.") from error
    source = sources.tfds_source(name, data_dir)
    folder = sources.tfds_version_dir(tfds_name, data_dir)
    print(f"{name}: {len(source.images)} training and {len(source.test_images)} test images, "
          f"{len(source.class_names)} classes\n  TFDS files and decoded images: {folder}")


def main() -> None:
    parser = tools.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--data_dir", type=Path, default=cli.default_data_dir(), help="default: %(default)s")
    args = parser.parse_args()
    for name in args.names:
        if name not in NAMES:
            raise UserError(f"Unknown dataset {name!r}; there are {', '.join(NAMES)}.")
    cli.start_tensorflow()
    for name in args.names or NAMES:
        prepare(name, args.data_dir.expanduser())


if __name__ == "__main__":
    tools.exit_on_user_error(main)
