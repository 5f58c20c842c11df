"""The language of `--augment`: `labeled.weak.strong`, such as d.d.d or d.d.rac, or four parts, as d.aac.d.aac."""
import re
from dataclasses import dataclass

from libml.errors import UserError

LEVELS = 16  # magnitudes 0..15, all that the operations know
_CUTOUT = 50  # percent of the side, where a name has a c

_GRAMMAR = ("labeled.weak.strong or labeled.labeled_strong.weak.strong, with labeled and weak in d (default), "
            "m (mirror), x (none), strong and labeled_strong in d (CTAugment), x (no policy) or a policy; labeled can "
            "be a policy too; policies are ra, rac, rac2 to rac9, r<ops>_<magnitude 1 to 15>_<cutout %>, aa, aac; "
            "for example d.d.d, d.d.r2_9_50 or d.aac.d.aac")
_WEAK = ("d", "m", "x")


@dataclass(frozen=True)
class RandAugment:
    """How RandAugment draws: magnitudes uniform over lowest..highest; `cutout` is in percent of the side."""

    depth: int = 2
    lowest: int = 1
    highest: int = 9  # of a scale of 10
    probability: float = 0.5
    cutout: int = 0


@dataclass(frozen=True)
class AutoAugment:
    cutout: int = 0  # in percent of the side


def parse_policy(part: str) -> RandAugment | AutoAugment | None:
    """RandAugment's or AutoAugment's settings; None for a part that names neither."""
    if part in ("aa", "aac"):
        return AutoAugment(_CUTOUT if part == "aac" else 0)
    if re.fullmatch(r"ra|rac[2-9]?", part):
        return RandAugment(highest=int(part[3:] or 10) - 1, cutout=_CUTOUT if part != "ra" else 0)
    match = re.fullmatch(r"r([1-9]\d{0,3})_([1-9]|1[0-5])_(\d{1,2}|100)", part)
    if not match:
        return None
    depth, magnitude, cutout = map(int, match.groups())
    return RandAugment(depth, magnitude, magnitude, 1.0, cutout)


@dataclass(frozen=True)
class AugmentSpec:
    """Which augmentation labelled images, weak views and strong views get; labeled_strong "" is what strong says."""

    labeled: str = "d"
    weak: str = "d"
    strong: str = "d"
    labeled_strong: str = ""

    def __str__(self) -> str:
        return ".".join(filter(None, (self.labeled, self.labeled_strong, self.weak, self.strong)))

    @property
    def labeled_policy(self) -> bool:
        return self.labeled not in _WEAK

    @property
    def uses_ctaugment(self) -> bool:
        return "d" in (self.strong, self.labeled_strong)

    def under(self, part: str) -> tuple[str, str]:
        """The weak view under a part's strong view, and its policy; part: "strong", "labeled_strong" or "labeled"."""
        if part == "strong" or part == "labeled_strong" and not self.labeled_strong:
            return self.weak, self.strong
        return "d" if self.labeled_policy else self.labeled, self.labeled if part == "labeled" else self.labeled_strong

    def check_policies(self, policies: str) -> None:
        """UserError where AutoAugment is asked for and there are no `policies` of it for the dataset."""
        if not policies and {"aa", "aac"} & {self.labeled, self.strong, self.labeled_strong}:
            raise UserError(f"--augment={self}: AutoAugment has policies for cifar10, cifar100, svhn and svhn_noextra "
                            "only; on other images take RandAugment, as in d.d.rac.")


def parse_augment(text: str) -> AugmentSpec:
    """Parses three or four parts; UserError says what came, what is wrong with it, and the grammar."""
    parts = str(text).split(".")
    names = ["labeled", *["labeled_strong"] * (len(parts) == 4), "weak", "strong"]
    named = dict(zip(names, parts, strict=False))
    try:
        if len(parts) not in (3, 4):
            raise ValueError(f"{len(parts)} part{'s' * (len(parts) != 1)} instead of 3 or 4")
        for name, part in named.items():
            policy = parse_policy(part)
            if policy and name == "weak":
                raise ValueError(f"{part!r} is a policy, which the weak part cannot have")
            if not policy and part not in (("d", "x") if name.endswith("strong") else _WEAK):
                raise ValueError(f"unknown {name} part {part!r}")
    except ValueError as error:
        raise UserError(f"--augment={text}: {error}; expected {_GRAMMAR}") from error
    return AugmentSpec(**named)
