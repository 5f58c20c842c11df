"""The command line: the only place that defines flags and reads the environment."""
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def _import_tensorflow() -> None:
    """Imports TensorFlow with oneDNN on (unless the user says otherwise) and without its banner.

    TensorFlow reads its environment once, when it is imported, and leaves oneDNN off on CPUs without AVX-512. Its
    start-up messages go straight to file descriptor 2, where they would bury ours; they are shown if the import fails.
    """
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        return  # the user wants to see everything
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as banner:
        os.dup2(banner.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()  # drivers complain on first use
        except BaseException:
            banner.seek(0)
            os.write(stderr, banner.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


_import_tensorflow()

from libml.errors import UserError  # noqa: E402


def default_data_dir() -> Path:
    """Returns $ML_DATA, else what TFDS itself would use."""
    chosen = os.environ.get("ML_DATA") or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(chosen).expanduser()


def guarded(main: Callable[[], int | None]) -> None:
    """Runs a program's main function; a UserError becomes one line on stderr and exit code 2."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
