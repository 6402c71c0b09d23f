"""The barrier on a line between two checkpoints, and the error of its points."""

import dataclasses

import numpy as np

from t5x_fwdloss.analysis.numbers import Number

BETWEEN_POINTS = "how far parabolas through three points rise above them"


@dataclasses.dataclass(frozen=True)
class Barrier:
    """The barrier between two checkpoints.

    Attributes:
        height: the largest height of the points above the chord.
        place: where.
        error: what parabolas rise above that, at most.
    """

    height: float
    place: float
    error: float

    def numbers(self, unit: str) -> dict[str, Number]:
        """The numbers of the report."""
        return {
            "barrier_height": Number(self.height, unit, self.error, BETWEEN_POINTS),
            "barrier_place": Number(self.place, "1"),
        }


def barrier(places: np.ndarray, losses: np.ndarray) -> Barrier:
    """The barrier of a line, and what may be missed between its points.

    On an interval of width h a parabola of second derivative -k is k t (h - t) / 2 above
    the chord of the interval, at t from its beginning.

    Args:
        places: from 0 to 1, increasing, at least three.
        losses: the losses there.
    """
    heights = losses - (1 - places) * losses[0] - places * losses[-1]
    widths = np.diff(places)
    bends = np.maximum(0.0, -np.diff(np.diff(losses) / widths))
    bends = 2 * bends / (widths[:-1] + widths[1:])
    # Each interval is part of one or two parabolas.
    bends = np.maximum(np.append(bends, bends[-1]), np.insert(bends, 0, bends[0]))
    rises = np.diff(heights) / widths
    steps = rises / np.where(bends > 0, bends, 1.0)
    steps = np.clip(widths / 2 + steps, 0.0, widths)
    reach = heights[:-1] + rises * steps + bends * steps * (widths - steps) / 2
    top = int(np.argmax(heights))
    height = float(heights[top])
    return Barrier(height, float(places[top]), max(0.0, float(reach.max()) - height))
