"""Is a choice equivalent to exact training? Two one-sided tests on differences of paired seeds.

Schuirmann 1987, A comparison of the two one-sided tests procedure and the power approach for
assessing the equivalence of average bioavailability. A choice that is better than exact passes, so
only the lower one of the two tests can fail. Pure functions.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats takes a second to load

_ALPHA = 0.05


@dataclass(frozen=True)
class Verdict:
    """Differences in score, choice - exact; more is better.

    margin: the loss that counts as none, above 0. least: the lower end of the one-sided 95 %
        confidence interval. diverged: how many seeds of the choice ended without a finite score,
        which makes it worse; the other numbers are of the rest.
    """

    pairs: int
    mean: float
    standard_error: float
    least: float
    margin: float
    diverged: int = 0

    @property
    def equivalent(self) -> bool:
        """Whether a loss as large as the margin can be ruled out."""
        return self.least > -self.margin and not self.diverged

    @property
    def worse(self) -> bool:
        """Whether the choice certainly loses more than the margin."""
        return self.mean + (self.mean - self.least) < -self.margin or self.diverged > 0

    @property
    def word(self) -> str:
        """The verdict for a table."""
        return "equivalent" if self.equivalent else "worse" if self.worse else "open"


def judge(
    scores: dict[int, float], exact: dict[int, float], margin: float, relative: bool
) -> Verdict:
    """Compare scores by seed. margin: in points or, if relative, as a part of the exact mean.

    Raises ValueError for fewer than two common seeds with finite scores, and if exact training has
    diverged with one.
    """
    common = sorted(scores.keys() & exact.keys())
    if not all(math.isfinite(exact[seed]) for seed in common):
        raise ValueError("exact training has diverged: nothing can be compared with it")
    seeds = [seed for seed in common if math.isfinite(scores[seed])]
    if len(seeds) < 2:
        raise ValueError("an equivalence test needs at least two common seeds")
    differences = [scores[seed] - exact[seed] for seed in seeds]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(seeds))
    least = mean - float(stdtrit(len(seeds) - 1, 1 - _ALPHA)) * error
    if relative:
        margin *= abs(statistics.fmean(exact[seed] for seed in seeds))
    return Verdict(len(common), mean, error, least, margin, len(common) - len(seeds))
