"""Which images to label next: those that a model is unsure of, apart from each other and from what is labelled."""
from __future__ import annotations

import numpy as np

ORDERS = ("spread", "unsure", "random")
LOOKED_AT = 4000  # images among which a choice is made


def unit(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors [N, D] of length 1."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def ranking(order: str, size: np.ndarray, vectors: np.ndarray, labelled: np.ndarray, count: int,
            rng: np.random.Generator) -> np.ndarray:
    """Returns `count` indices of images, the first one to be labelled first.

    Args:
        order: "unsure" takes the largest credal sets first; "spread" weights each by its squared distance to what is
            labelled or chosen before and draws; "random".
        size: [N], how large the credal set of each image is, 0 to 1.
        vectors: [N, D], their features, of length 1; `labelled` [L, D], those of labelled images.
    """
    looked = rng.permutation(len(size))
    if order == "random":
        return looked[:count]
    if order == "unsure":
        return np.argsort(-size, kind="stable")[:count]
    looked = looked[:LOOKED_AT]
    x, sizes = vectors[looked], size[looked]
    near = (x @ labelled.T).max(1) if len(labelled) else np.full(len(x), -1.0, np.float32)
    chosen: list[int] = []
    for _ in range(min(count, len(looked))):
        weight = (sizes + 1e-3) * np.maximum(1 - near, 0)  # 1 - cos is half the squared distance
        weight[chosen] = 0
        total = weight.sum()
        best = int(rng.choice(len(x), p=weight / total)) if total > 0 else int(np.argmax(
            np.where(np.isin(np.arange(len(x)), chosen), -1, sizes)))
        chosen.append(best)
        near = np.maximum(near, x @ x[best])
    return looked[chosen]
