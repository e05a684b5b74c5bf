"""A downstream task on frozen vectors: softmax regression, trained on one part and tested on the other. Plain NumPy.

Knows nothing of models; the split and the result follow from the seed alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plugins.errors import KilnError

FloatArray = NDArray[np.float64]
_DECAY = 1e-4
"""L2 penalty on the weights."""
_STEPS = 500


@dataclass(frozen=True)
class Split:
    """Rows to train on and to test on."""

    train: NDArray[np.integer]
    test: NDArray[np.integer]


def split(labels: NDArray[np.integer], train_share: float, seed: int) -> Split:
    """Each class in the same proportion. Raises KilnError for fewer than 2 classes, or than 2 rows of one."""
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2 or counts.min() < 2:
        raise KilnError(
            f"the task has {len(labels)} labelled rows of {len(classes)} classes, the smallest of "
            f"{min(counts, default=0)}; expected 2 classes or more with 2 rows or more each"
        )
    generator = np.random.default_rng(seed)
    train, test = [], []
    for kind, count in zip(classes, counts, strict=True):
        rows = generator.permutation(np.flatnonzero(labels == kind))
        cut = min(max(1, round(float(train_share * count))), int(count) - 1)
        train.append(rows[:cut])
        test.append(rows[cut:])
    return Split(np.sort(np.concatenate(train)), np.sort(np.concatenate(test)))


@dataclass(frozen=True)
class SoftmaxRegression:
    """Weights [features, classes] of standardised vectors."""

    classes: NDArray[np.integer]
    mean: FloatArray
    scale: FloatArray
    weights: FloatArray
    bias: FloatArray

    def accuracy(self, vectors: NDArray, labels: NDArray[np.integer]) -> float:
        """Share of rows [rows, features] whose class is found."""
        scores = (vectors - self.mean) / self.scale @ self.weights + self.bias
        return float((self.classes[scores.argmax(axis=1)] == labels).mean())


def fit(vectors: NDArray, labels: NDArray[np.integer]) -> SoftmaxRegression:
    """Multinomial logistic regression by Nesterov's accelerated gradient descent from zero: the same every time."""
    x = np.asarray(vectors, np.float64)
    mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-8)
    x = (x - mean) / scale
    classes, target = np.unique(labels, return_inverse=True)
    one_hot = np.eye(len(classes))[target]
    rows, features = x.shape
    # The loss's curvature is at most half of that of the squares (Boehning 1992).
    step = 1.0 / (0.5 * np.linalg.norm(np.c_[x, np.ones(rows)], 2) ** 2 / rows + _DECAY)
    weights = ahead_w = np.zeros((features, len(classes)))
    bias = ahead_b = np.zeros(len(classes))
    for number in range(_STEPS):
        scores = x @ ahead_w + ahead_b
        scores -= scores.max(axis=1, keepdims=True)
        probabilities = np.exp(scores)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        residual = (probabilities - one_hot) / rows
        new_w = ahead_w - step * (x.T @ residual + _DECAY * ahead_w)
        new_b = ahead_b - step * residual.sum(axis=0)
        momentum = number / (number + 3.0)
        ahead_w, ahead_b = new_w + momentum * (new_w - weights), new_b + momentum * (new_b - bias)
        weights, bias = new_w, new_b
    return SoftmaxRegression(classes, mean, scale, weights, bias)
