"""What XTrace holds: the subspace, the probes, and the small matrices between them."""

import math

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature import basis, probes, sketches, trees


def draw_probe(params: PyTree, key: probes.Key, number: int) -> PyTree:
    """Probe `number`, Gaussian."""
    return probes.random_like(probes.probe_key(key, number), params, "normal")


class XtraceState:
    """The vectors and the small matrices, grown probe by probe: where a run stands.

    The probes are not in what is saved: they are drawn again from the key.
    """

    def __init__(self, params: PyTree, on_host: bool = False):
        """An empty state.

        Args:
          params: The parameters (or any vector), for shapes and shardings.
          on_host: Whether the vectors are kept in pinned host memory.
        """
        like = trees.zeros_like(params)
        self.epsilon = trees.epsilon(like)
        self.space = basis.Basis(like, on_host=on_host)  # Q
        self.omega = basis.Basis(like, on_host=on_host)
        self.r = np.zeros((0, 0))  # Q^T A Omega
        self.w = np.zeros((0, 0))  # Q^T Omega
        self.h = np.zeros((0, 0))  # Q^T A Q
        self.quadratic = np.zeros(0)  # omega_i A omega_i
        self.squares = np.zeros(0)  # |omega_i|^2
        self.num_saved = 0  # probes of a saved state

    @property
    def num_products(self) -> int:
        """Products so far."""
        return max(self.omega.size, self.num_saved) + len(self.h)

    def arrays(self) -> dict:
        """The state's arrays, a pytree to be saved."""
        numbers = {
            name: getattr(self, name)
            for name in ("r", "w", "h", "quadratic", "squares")
        }
        return {"vectors": list(self.space.vectors), **numbers}

    def metadata(self) -> dict:
        """The rest of the state, plain numbers that JSON holds."""
        return {"space": self.space.metadata(), "num_probes": self.omega.size}

    @classmethod
    def from_saved(cls, like: PyTree, arrays: dict, metadata: dict) -> "XtraceState":
        """The state that `arrays` and `metadata` were taken from, to the bit.

        The probes are still to be drawn: `xtrace` does that.

        Args:
          like: A vector that gives shapes, types and shardings.
          arrays: As `arrays()` gave them.
          metadata: As `metadata()` gave it.

        Returns:
          The state.
        """
        state = cls(like, metadata["space"]["on_host"])
        space = basis.Basis.from_saved(like, arrays["vectors"], metadata["space"])
        state.space, state.num_saved = space, metadata["num_probes"]
        shapes = {"r": (space.size, -1), "w": (space.size, -1)}
        for name in ("r", "w", "h", "quadratic", "squares"):
            saved = np.array(arrays[name], np.float64)
            setattr(state, name, saved.reshape(shapes.get(name, saved.shape)))
        return state

    def draw_again(self, params: PyTree, key: probes.Key) -> None:
        """Puts the probes of a saved state in their place."""
        for number in range(self.omega.size, self.num_saved):
            self.omega.append(draw_probe(params, key, number), 1.0)

    def add_probe(self, probe, product, name):
        """Takes in one probe and its product; returns the new q, or None."""
        number = self.omega.size
        self.omega.append(probe, 1.0)
        inner = float(trees.inner(probe, product))
        self.quadratic = np.append(self.quadratic, inner)
        self.squares = np.append(self.squares, float(trees.inner(probe, probe)))
        coefficients, grew = sketches.extend(self.space, product, name)
        size = self.space.size
        self.r = _grown(self.r, size, number + 1)
        self.w = _grown(self.w, size, number + 1)
        self.r[:, number] = coefficients
        self.w[:, number] = self.space.coefficients(probe)
        if not grew:
            return None
        q = self.space.row(size - 1)
        self.w[size - 1] = self.omega.coefficients(q)
        return q

    def add_row(self, q_product):
        """Takes in the product with the oldest q that has none yet."""
        column = self.space.coefficients(q_product)
        known = len(self.h)
        self.h = _grown(self.h, known + 1, known + 1)
        # A is symmetric, so the new row is known, too.
        self.h[: known + 1, known] = column[: known + 1]
        self.h[known, : known + 1] = column[: known + 1]

    def estimates(self, dimension) -> tuple[np.ndarray, float]:
        """The leave-one-out estimates, and the jackknife standard error of their mean."""
        count = self.omega.size
        if self.space.size < count:  # the range is exhausted, whichever is left out
            return np.full(count, np.trace(self.h)), 0.0
        # Column i is orthogonal to all columns of R but number i: what is lost with it.
        lost = np.linalg.inv(self.r).T
        lost /= np.linalg.norm(lost, axis=0)
        samples = np.array(
            [self._left_out(i, lost[:, [i]], dimension) for i in range(count)]
        )
        if count < 3:
            return samples, float(samples.std(ddof=1) / math.sqrt(count))
        means = np.array([self._mean_without(j, lost, dimension) for j in range(count)])
        spread = ((means - means.mean()) ** 2).sum()
        return samples, math.sqrt((count - 1) / count * spread)

    def _mean_without(self, j, lost, dimension):
        """XTrace's estimate from all probes but number j."""
        values = []
        for i in range(self.omega.size):
            if i == j:
                continue
            first = lost[:, i]
            second = lost[:, j] - first * (first @ lost[:, j])
            second /= np.linalg.norm(second)
            pair = np.stack([first, second], axis=1)
            values.append(self._left_out(i, pair, dimension))
        return np.mean(values)

    def _left_out(self, i, lost, dimension):
        """The estimate with probe i outside of Q without the directions `lost`."""
        kept = self.space.size - lost.shape[1]
        x = self.w[:, i] - lost @ (lost.T @ self.w[:, i])
        inside = np.trace(self.h) - np.einsum("ij,ik,kj->", lost, self.h, lost)
        rest = self.quadratic[i] - 2 * x @ self.r[:, i] + x @ self.h @ x
        square = self.squares[i] - x @ x
        if square <= self.epsilon * self.squares[i]:
            return inside
        return inside + (dimension - kept) / square * rest

    def rounding(self) -> float:
        """The size of rounding errors in the estimate, a floor for its error."""
        return self.epsilon * float(np.abs(np.diag(self.h)).sum())


def _grown(matrix, rows, columns):
    grown = np.zeros((rows, columns))
    grown[: matrix.shape[0], : matrix.shape[1]] = matrix
    return grown
