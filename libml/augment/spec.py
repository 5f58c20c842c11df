"""The language of `--augment`: three parts `labeled.weak.strong`, such as d.d.d, d.d.rac or d.d.r2_9_50."""

import re
from dataclasses import dataclass

from libml.errors import UserError

MAGNITUDES = 9  # of a scale of 10; at 10 Posterize would keep no bit, which Pillow rejects

_GRAMMAR = ("labeled.weak.strong with labeled and weak in d (default), m (mirror), x (none), and strong in "
            "d (CTAugment), ra, rac, r<ops>_<magnitude>_<cutout %>, x (no policy); for example d.d.d or d.d.r2_9_50")
_RAND = re.compile(r"r(\d+)_(\d+)_(\d+)")


@dataclass(frozen=True)
class RandAugment:
    """How RandAugment draws: `magnitude` None means uniform over 1..9, `cutout` is in percent of the side."""

    depth: int = 2
    magnitude: int | None = None
    probability: float = 0.5
    cutout: int = 0


@dataclass(frozen=True)
class AugmentSpec:
    """Which augmentation the labelled images, the weak views and the strong views get."""

    labeled: str = "d"
    weak: str = "d"
    strong: str = "d"

    def __str__(self) -> str:
        return f"{self.labeled}.{self.weak}.{self.strong}"

    @property
    def rand_augment(self) -> RandAugment | None:
        """RandAugment's settings, or None if the strong part is another."""
        if self.strong in ("ra", "rac"):
            return RandAugment(cutout=50 if self.strong == "rac" else 0)
        match = _RAND.fullmatch(self.strong)
        if not match:
            return None
        depth, magnitude, cutout = map(int, match.groups())
        return RandAugment(depth, magnitude, 1.0, cutout)


def _error(text: str, reason: str) -> UserError:
    return UserError(f"--augment={text}: {reason}; expected {_GRAMMAR}")


def parse_augment(text: str) -> AugmentSpec:
    """Parses `labeled.weak.strong`; UserError says what came, what is wrong with it, and the grammar."""
    parts = str(text).split(".")
    if len(parts) != 3:
        raise _error(text, f"{len(parts)} part{'s' * (len(parts) != 1)} instead of 3")
    spec = AugmentSpec(*parts)
    for name, part in (("labeled", spec.labeled), ("weak", spec.weak)):
        if part not in ("d", "m", "x"):
            policy = _RAND.fullmatch(part) or part in ("ra", "rac", "aa", "aac")
            raise _error(text, f"{part!r} is a policy, which only the strong part can have" if policy
                         else f"unknown {name} part {part!r}")
    rand = spec.rand_augment
    if spec.strong in ("aa", "aac"):
        raise _error(text, "AutoAugment is not implemented")
    if rand is None and spec.strong not in ("d", "x"):
        raise _error(text, f"unknown strong part {spec.strong!r}")
    if rand is not None and rand.depth < 1:
        raise _error(text, "RandAugment needs at least 1 operation")
    if rand is not None and rand.magnitude is not None and not 1 <= rand.magnitude <= MAGNITUDES:
        raise _error(text, f"magnitude {rand.magnitude} is not in 1..{MAGNITUDES}")
    if rand is not None and rand.cutout > 100:
        raise _error(text, f"cutout of {rand.cutout}% is not in 0..100")
    return spec
