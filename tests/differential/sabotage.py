"""Code broken on purpose, one part at a time: the harness must see each of them.

`python -m tests.differential.sabotage` prints two verdicts for each entry, of the whole code and of the broken one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.differential import history
from tests.differential.features import Features, parse
from tests.differential.lanes import Case, verdicts

SEED = 4
KILL = "3 workers; kill w1 commit.before@6"
JOIN = "2 workers; join w2 step@10"


@dataclass(frozen=True, slots=True)
class Sabotage:
    """before: what breaks it. problem: a part of what the harness says then."""

    before: str
    features: tuple[str, ...]
    happened: str
    problem: str

    @property
    def cases(self) -> tuple[Case, Case]:
        f = parse(Features(SEED), list(self.features))
        happened = history.parse(self.happened)
        return Case(f, happened), Case(f, happened, self.before)


SABOTAGE = {
    "roll-back": Sabotage(
        """
import bagua_core.elastic.state.state_registry as registry
registry.StateRegistry.roll_back = lambda self: None
""",
        ("buffers=counted",),
        KILL,
        "forwards",
    ),
    "weights of shares": Sabotage(
        """
import bagua_core.data.division as division
piece = division.EvenDivision.piece
division.EvenDivision.piece = lambda self, key: piece(self, key)._replace(weight=1 / key.active_count)
""",
        (),
        "2 workers",
        "model net.first.weight differs",
    ),
    "the optimizer's part of a copy": Sabotage(
        """
import bagua_core.elastic.state.state_registry as registry
restore = registry.StateRegistry.restore
def lacking(self, state):
    restore(self, {**state, "optimizers": [o.state_dict() for o in self.optimizers]})
registry.StateRegistry.restore = lacking
""",
        ("momentum",),
        JOIN,
        "w0 and w2 are not the same",
    ),
    "gradients of earlier draws": Sabotage(
        """
import bagua_core.elastic.state.state_registry as registry
registry.StateRegistry.roll_back_gradients = lambda self: None
""",
        ("accumulation=3",),
        "3 workers; kill w1 commit.before@4",
        "differs",
    ),
    "parameters that the script changes": Sabotage(
        """
import bagua_core.elastic.state.state_registry as registry
registry.StateRegistry.protect = lambda self: None
""",
        ("after_step=shrink",),
        KILL,
        "differs",
    ),
    "copies of the boundary": Sabotage(
        """
import bagua_core.elastic.state.boundary_copy as boundary_copy
boundary_copy.BoundaryCopy.put_back = lambda self: False
""",
        ("sharpness=sam",),
        "3 workers; kill w1 part@6",
        "differs",
    ),
    "a closure's step that failed": Sabotage(
        """
import bagua_core.elastic.state.state_registry as registry
import bagua_core.optimizers.repeated_closure as repeated_closure
registry.StateRegistry.first_reduced = lambda self: None
repeated_closure.Before.put_back = lambda self: None
""",
        ("lbfgs",),
        "3 workers; kill w1 part@6",
        "differs",
    ),
    "what a holder's script does until its first reduction": Sabotage(
        """
import bagua_core.elastic.step.copying as copying
begins = copying.Copying.step_begins
def early(self):
    begins(self)
    self.reduced()
copying.Copying.step_begins = early
""",
        ("rate=by_hand",),
        JOIN,
        "w0 and w2 are not the same",
    ),
    "what a script does between two epochs, for a joiner": Sabotage(
        """
import bagua_core.elastic.step.copying as copying
enter = copying.Copying.enter
def early(self, communicator, plan):
    enter(self, communicator, plan)
    self.step_begins()
    self.reduced()
copying.Copying.enter = early
""",
        ("schedule=epoch",),
        "2 workers; join w2 step@7",
        "w0 and w2 are not the same",
    ),
    "what a script does between two epochs, for a checkpoint": Sabotage(
        """
import bagua_core.elastic.step.engine as engine
commit = engine.Engine._commit
def early(self):
    commit(self)
    if self.state.owes_checkpoint:
        self.state.owes_checkpoint = False
        self._checkpoints.write(self.plan.active_index, self.plan.active_count)
engine.Engine._commit = early
""",
        ("schedule=epoch",),
        "2 workers; all killed @9 settled, 3 resume",
        "differs",
    ),
    "data types of an optimizer's state": Sabotage(
        """
import bagua_core.elastic.state.optimizer_state as optimizer_state
optimizer_state.load = lambda optimizer, state_dict: optimizer.load_state_dict(state_dict)
""",
        ("nadam",),
        JOIN,
        "w0 and w2 are not the same",
    ),
    "steps of a checkpoint that lack lines": Sabotage(
        """
import bagua_core.elastic.state.commit_history as commit_history
commit_history.History.resumed = lambda self: commit_history.History()
""",
        (),
        "2 workers; all killed @6 settled, 3 resume",
        "steps 6..6 are missing",
    ),
    "lines of the ledger": Sabotage(
        """
import bagua_core.elastic.ledger.ledger_lines as ledger_lines
ledger_lines.LedgerLines.write = lambda self, due: None
""",
        (),
        "2 workers",
        "the ledger has 0 steps",
    ),
    "random numbers of a step": Sabotage(
        """
import bagua_core.elastic.step.step_seed as step_seed
step_seed.seed_generators = lambda seed, step, global_rank: None
""",
        ("dropout=layer",),
        KILL,
        "differs",
    ),
    "buffers of a batch normalization": Sabotage(
        """
import bagua_core.elastic.state.state_registry as registry
registry.StateRegistry.roll_back = lambda self: None
""",
        ("norm=batch",),
        KILL,
        "num_batches_tracked differs",
    ),
    "statistics of the global batch": Sabotage(
        """
import bagua_core.sync_batchnorm as sync_batchnorm
sync_batchnorm.SyncBatchNorm._peers = lambda self: None
""",
        ("norm=sync_batch",),
        JOIN,
        "differs",
    ),
    "kills": Sabotage(
        """
import bagua_core.elastic.failpoints as failpoints
failpoints.Failpoints.reach = lambda self, name, step: None
""",
        (),
        KILL,
        "did not happen: kill w1",
    ),
}


def main() -> None:
    cases = [case for sabotage in SABOTAGE.values() for case in sabotage.cases]
    for verdict in verdicts(cases, at_once=1):
        print(verdict.encode().decode(), flush=True)


if __name__ == "__main__":
    main()
