"""Which images are labelled and in which order the others come, equal to FixMatch's files image by image."""
from collections import deque

import numpy as np


def class_frequencies(labels: np.ndarray, num_classes: int) -> np.ndarray:
    counts = np.bincount(labels, minlength=num_classes).astype(np.float64)
    return counts / counts.max()


def _most_wanted(frequencies: np.ndarray, taken: np.ndarray) -> int:
    """The class that is furthest behind its share; the first one of equals."""
    return int(np.argmax(frequencies - taken / max(taken.max(), 1)))


def labeled_indices(labels: np.ndarray, size: int, seed: int, frequencies: np.ndarray) -> np.ndarray:
    """Returns the indices of `size` labelled images as they are drawn, classes in proportion to `frequencies`; labels
    of -1 are not drawn. Seed 0 takes each class in its stored order, any other seed shuffles the classes one after the
    other with NumPy's legacy generator, as the published splits did."""
    queues = [np.flatnonzero(labels == c) for c in range(len(frequencies))]
    if seed:
        generator = np.random.RandomState(seed)
        for queue in queues:
            generator.shuffle(queue)
    lengths = np.array([len(queue) for queue in queues])
    taken = np.zeros(len(frequencies), np.int64)
    frequencies = np.where(lengths > 0, frequencies, -np.inf)
    out = np.empty(size, np.int64)
    for i in range(size):
        c = _most_wanted(frequencies, taken)
        out[i] = queues[c][taken[c]]
        taken[c] += 1
        if taken[c] == lengths[c]:
            frequencies[c] = -np.inf  # an exhausted class is never wanted again
    return out


def unlabeled_order(labels: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Orders all training images so that every prefix has about the wanted class shares: images wait in one queue per
    class as they are read, until theirs is the class that is furthest behind; the rest follows class by class."""
    queues: list[deque[int]] = [deque() for _ in frequencies]
    taken = np.zeros(len(frequencies), np.int64)
    wanted = _most_wanted(frequencies, taken)
    order = []
    for index, label in enumerate(labels.tolist()):
        queues[label].append(index)
        while queues[wanted]:
            order.append(queues[wanted].popleft())
            taken[wanted] += 1
            wanted = _most_wanted(frequencies, taken)
    for queue in queues:
        order.extend(queue)
    return np.array(order, np.int64)


def held_out(labels: np.ndarray, hashes: np.ndarray, share: float, seed: list[int]) -> np.ndarray:
    """Returns the sorted indices of about a `share` of every class: those whose hash, mixed with the seed, is small.

    So an image stays on its side whatever comes or goes beside it. The exception keeps small classes usable: of two
    images or more the smallest hash is held out and the largest is not, even if that is the wrong side of the share.
    """
    factor = 2 * np.random.RandomState(seed).randint(2 ** 63, size=1, dtype=np.uint64) + 1  # odd: hashes stay distinct
    mixed = hashes * factor  # modulo 2^64
    held = mixed < np.uint64(share * 2 ** 64)
    order = np.lexsort((mixed, labels))
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    held[order[starts]] = True
    held[order[np.append(starts, len(order))[1:] - 1]] = False  # also of a class with one image
    return np.flatnonzero(held)
