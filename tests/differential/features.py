"""The features of a training script that a seed draws.

`draw(seed)` gives `Features`, a plain value; `script.py` is the script that has them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

PLAIN = "none"
LATE_SCALE = 4.0
"""A power of two: what is multiplied and divided by it is rounded as without."""


@dataclass(frozen=True, slots=True)
class Features:
    """optimizer: a name in optimizers.py. dtype: of the model. loop: who draws the samples.

    norm: "batch" looks at the worker's own share, "sync_batch" at the global batch. dropout: "by_sample" has masks that
    follow from (epoch, sample), "layer" is nn.Dropout, whose masks follow from step and rank. head: the last layer has
    an optimizer of its own. buffers: a count of training forwards, kept in place or assigned anew. encoder: an EMA copy
    of the first layer that forward updates and uses. average: an EMA of the weights, updated after optimizer.step, and
    where it is kept.
    after_step: what is done to the parameters by hand after optimizer.step. schedule: when the scheduler steps.
    rate: the learning rate is set by hand at the top of the loop body. accumulation: draws for one optimizer step.
    parts: a second model and optimizer in each step; "gan" has two backwards, "shared" two over one graph.
    sharpness: SAM, two backwards in a step with the parameters moved in between. scaler: a GradScaler, which skips some
    steps. inside: a loss that is summed over the job in the step and goes into a registered value, "before" or "behind"
    optimizer.step.
    unfreeze: a layer is frozen until the second epoch begins. branch: a layer takes part in every second step only.
    update: the optimizer steps at the end of a draw, or "late" at the top of the next one, with gradients that were
    kept; they are of the loss times LATE_SCALE, by which the script divides them there.
    """

    seed: int
    optimizer: str = "sgd"
    dtype: str = "float64"
    loop: str = "loader"
    norm: str = PLAIN
    dropout: str = PLAIN
    buffers: str = PLAIN
    encoder: str = PLAIN
    average: str = PLAIN
    after_step: str = PLAIN
    schedule: str = PLAIN
    rate: str = PLAIN
    clip: str = PLAIN
    accumulation: int = 1
    micro: str = PLAIN
    parts: str = PLAIN
    sharpness: str = PLAIN
    scaler: str = PLAIN
    inside: str = PLAIN
    evaluation: str = PLAIN
    unfreeze: str = PLAIN
    branch: str = PLAIN
    head: str = PLAIN
    update: str = PLAIN
    batch: int = 12
    batches: int = 4
    epochs: int = 3

    @property
    def steps(self) -> int:
        return self.batches * self.epochs

    @property
    def samples(self) -> int:
        """With a loader the last batch of an epoch is short."""
        return self.batches * self.batch - (5 if self.loop != "next_step" else 0)

    @property
    def looks_at_share(self) -> bool:
        """Whether the mathematics depends on which worker has which samples: one process then needs to know that."""
        return self.dropout == "layer" or self.norm == "batch"

    @property
    def has_closure(self) -> bool:
        """Whether the optimizer calls a closure several times in a step."""
        return self.optimizer == "lbfgs"

    @property
    def goes_on_behind_a_reduction(self) -> bool:
        """Whether a step has a point that the script calls "part": other collectives of the step come before and after
        it."""
        return (
            self.has_closure
            or self.parts == "gan"
            or self.sharpness != PLAIN
            or (self.inside == "behind" and self.accumulation == 1)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every choice that is not the plain one, as "field=choice"."""
        plain = Features(self.seed)
        return tuple(
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("seed", "batch", "batches", "epochs")
            and getattr(self, f.name) != getattr(plain, f.name)
        )

    @property
    def most_workers(self) -> int:
        """Without a loader every worker's share has the same size, so the batch divides by any number up to this."""
        return 4


ADAMS = ("adam", "adamw", "amsgrad", "nadam", "radam", "adamax")
CHOICES: dict[str, tuple[tuple[object, int], ...]] = {
    "optimizer": (
        *((name, 2) for name in ("sgd", "momentum", "nesterov", "foreach", "adam", "adamw")),
        *((name, 1) for name in ("amsgrad", "nadam", "radam", "rmsprop", "adagrad", "asgd", "adamax", "adadelta")),
        ("master", 1), ("lbfgs", 2),
    ),
    "dtype": (("float64", 8), ("float32", 3), ("bfloat16", 1)),
    "loop": (("loader", 7), ("loader_process", 1), ("next_step", 2)),
    "norm": ((PLAIN, 4), ("layer", 1), ("group", 1), ("batch", 2), ("sync_batch", 2)),
    "dropout": ((PLAIN, 3), ("by_sample", 1), ("layer", 2)),
    "buffers": ((PLAIN, 3), ("counted", 1), ("reassigned", 1)),
    "encoder": ((PLAIN, 4), ("momentum", 1)),
    "average": ((PLAIN, 6), ("buffers", 1), ("parameters", 1), ("registered", 1)),
    "after_step": ((PLAIN, 5), ("clamp", 1), ("shrink", 1)),
    "schedule": ((PLAIN, 3), ("step", 2), ("epoch", 2), ("plateau", 1)),
    "rate": ((PLAIN, 4), ("by_hand", 1)),
    "clip": ((PLAIN, 3), ("norm", 1)),
    "accumulation": ((1, 6), (2, 1), (3, 1)),
    "micro": ((PLAIN, 5), ("local_batch", 1)),
    "parts": ((PLAIN, 6), ("gan", 2), ("shared", 1)),
    "sharpness": ((PLAIN, 7), ("sam", 1)),
    "scaler": ((PLAIN, 6), ("grows", 1)),
    "inside": ((PLAIN, 6), ("before", 1), ("behind", 1)),
    "evaluation": ((PLAIN, 2), ("allreduce", 1)),
    "unfreeze": ((PLAIN, 7), ("second_epoch", 1)),
    "branch": ((PLAIN, 7), ("every_second", 1)),
    "batches": ((3, 1), (4, 1), (5, 1)),
    "epochs": ((3, 2), (4, 1)),
    "head": ((PLAIN, 5), ("own_optimizer", 1)),
    "update": ((PLAIN, 9), ("late", 1)),
}  # fmt: skip


def draw(seed: int) -> Features:
    chance = random.Random(f"features {seed}")
    drawn = {name: _pick(chance, choices) for name, choices in CHOICES.items()}
    return _fitting(replace(Features(seed), **drawn))  # type: ignore[arg-type]


def parse(features: Features, assignments: list[str]) -> Features:
    """`features` with "field=choice" or a bare optimizer's name in place. Raises ValueError."""
    for text in assignments:
        name, _, value = text.partition("=")
        if not value:
            name, value = "optimizer", name
        known = {str(choice): choice for choice, _ in CHOICES.get(name, ())}
        if value not in known:
            raise ValueError(
                f"{text!r} is no feature; {name} is one of {', '.join(known) or ', '.join(CHOICES)}"
            )
        features = replace(features, **{name: known[value]})
    return _fitting(features)


def _pick(chance: random.Random, choices: tuple[tuple[object, int], ...]) -> object:
    return chance.choices([c for c, _ in choices], [w for _, w in choices])[0]


def _fitting(f: Features) -> Features:
    """Without combinations that have no meaning, or whose mathematics one process can't repeat.

    Micro-batches: how many forwards a step has follows from the largest share, so what counts forwards differs.
    bfloat16: with the optimizer made for it, or with one whose state has scalars in float32; others would compare the
    rounding of bfloat16 alone. Layers that look at a share: the ledger tells the shares, so there must be a loader, and
    bfloat16's reference job has others. Several forwards in a step draw several masks, which shares.py does not repeat.
    """
    if f.optimizer == "master" or f.dtype == "bfloat16":
        optimizer = "nadam" if f.optimizer in ADAMS else "master"
        f = replace(f, optimizer=optimizer, dtype="bfloat16", scaler=PLAIN, sharpness=PLAIN)
    if f.update == "late":
        # what one draw leaves to the next are gradients alone, and a scaler of a worker that joins has scaled none
        f = replace(f, micro=PLAIN, parts=PLAIN, sharpness=PLAIN, scaler=PLAIN)
        f = replace(f, accumulation=1, inside=PLAIN if f.inside == "behind" else f.inside)
    if f.has_closure:
        f = replace(f, update=PLAIN)
        # one optimizer that computes its gradients by itself, with a line search that rounding could turn
        f = replace(
            f, dtype="float64", accumulation=1, micro=PLAIN, parts=PLAIN, sharpness=PLAIN, scaler=PLAIN
        )
        f = replace(f, head=PLAIN, clip=PLAIN)
    if f.loop == "next_step":
        # nothing lies between two of its steps, so there is no evaluation; a step begins with its forward
        f = replace(f, micro=PLAIN, evaluation=PLAIN, update=PLAIN)
        f = replace(f, schedule="epoch" if f.schedule == "plateau" else f.schedule)
    if f.has_closure or f.sharpness != PLAIN or f.loop == "next_step" or f.dtype == "bfloat16":
        f = replace(f, dropout="by_sample" if f.dropout == "layer" else f.dropout)
    if f.has_closure or f.loop == "next_step" or f.dtype == "bfloat16":
        f = replace(f, norm="sync_batch" if f.norm == "batch" else f.norm)
    if f.sharpness != PLAIN:
        f = replace(f, accumulation=1, parts=PLAIN, micro=PLAIN)
        if f.dtype == "float32":
            # Where the second gradient is taken follows from the first one's rounding: in float32 that alone may differ
            # by more than is tolerated, on one processor and not on another.
            f = replace(f, dtype="float64")
    if f.inside != PLAIN or f.norm in ("batch", "sync_batch") or f.dropout == "layer":
        f = replace(f, micro=PLAIN)
    if f.norm == "batch":
        # an evaluation uses the running statistics, which are of another share after the loss of rank 0
        f = replace(f, evaluation=PLAIN, schedule=PLAIN if f.schedule == "plateau" else f.schedule)
    if f.micro != PLAIN:
        # The loop body runs once for each micro-batch, and so does what a script does by hand after optimizer.step.
        # The generator's loss sees the critic that the last micro-batch alone has updated.
        f = replace(f, buffers=PLAIN, encoder=PLAIN, average=PLAIN, after_step=PLAIN, scaler=PLAIN)
        f = replace(f, parts=PLAIN if f.parts == "gan" else f.parts)
    if f.parts == "shared":
        f = replace(f, accumulation=1)
    if f.parts != PLAIN:
        f = replace(f, unfreeze=PLAIN, branch=PLAIN, encoder=PLAIN, scaler=PLAIN)
    if f.schedule == "plateau":
        f = replace(f, evaluation="allreduce", rate=PLAIN)
    if f.schedule != PLAIN:
        f = replace(f, rate=PLAIN)
    return f
