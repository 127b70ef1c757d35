"""Measuring all models of a case in rounds, each next to `absolute`."""

import dataclasses
import gc
from collections.abc import Collection

from torch import nn
from tqdm.auto import tqdm

from training.evidence.speed.additions import Addition, States
from training.evidence.speed.clocks import machine_rates
from training.evidence.speed.intervals import estimate
from training.evidence.speed.limits import needed_work
from training.evidence.speed.measurements import ADDITIONS, BASELINE, PHASES, Case, Records, phases_of
from training.evidence.speed.models import Row, rotation_error
from training.evidence.speed.runner import Runner


@dataclasses.dataclass(frozen=True)
class Plan:
    """
    The measurements for every model of a case.

    Attributes:
        whole_rounds: Rounds that compare whole models.
        added_rounds: Largest number of rounds for an addition; fewer if its share is resolved.
        warmup: Steps of each model before the first round.
        steps: Steps per measurement.
        clock: Clock of the shares.
        errors: Whether to measure errors of rotations.
        memory: Whether to measure the peak memory in training.
    """

    whole_rounds: int
    added_rounds: int
    warmup: int
    steps: int
    clock: str
    errors: bool = False
    memory: bool = False

    def quantities(self, case: Case, row: Row) -> dict[str, tuple[str, int]]:
        """The timed quantities of a row, each with its phase and number of rounds."""
        timed = {phase: (phase, self.whole_rounds) for phase in phases_of(row)}
        if row.rotates:
            timed |= {quantity: (phase, self.added_rounds) for quantity, phase in case.additions(row).items()}
        return {name: work for name, work in timed.items() if work[1]}


class CaseRounds:
    """
    The missing measurements of a case.

    Args:
        case: The models and their setting.
        records: Existing and new measurements.
        plan: The measurements to make.
    """

    def __init__(self, case: Case, records: Records, plan: Plan):
        self.case, self.records, self.plan = case, records, plan
        self.title = "encodings" if case.axis is None else f"{case.axis} {case.value}"
        self.baselines, self.timers, self.states = {}, {}, None

    def measure(self) -> None:
        """Makes the measurements that the records lack."""
        rows = [row for row in self.case.rows if self.is_incomplete(row)]
        if not rows:
            return
        if self.plan.added_rounds and not self.records.find(self.case, "rates"):
            self.record("rates", Row.parse(BASELINE), machine_rates(self.case.settings.device))
        rows = dict.fromkeys([Row.parse(BASELINE), *rows])
        for row in tqdm(rows, desc=f"{self.title}: models", leave=False):
            if self.has_failed(row):
                continue
            try:
                self.prepare(row)
            except (RuntimeError, TypeError) as error:
                # The device lacks memory or an operation. Go on with the other rows.
                self.record("failed", row, f"{type(error).__name__}: {error}")
                self.timers = {key: timer for key, timer in self.timers.items() if key[0] != row}
                gc.collect()
        for quantities in (PHASES, ADDITIONS):
            self.take_rounds(quantities)

    def record(self, quantity: str, row: Row, value, **fields) -> None:
        self.records.add(case=self.case.key, quantity=quantity, row=row.name, value=value, **fields)

    def has_failed(self, row: Row) -> bool:
        return self.records.value(self.case, row, "failed") is not None

    def is_incomplete(self, row: Row) -> bool:
        if self.has_failed(row):
            return False
        lacks_rounds = any(self.rounds_left(row, quantity) for quantity in self.plan.quantities(self.case, row))
        return lacks_rounds or self.lacks_error(row) or self.lacks_memory(row)

    def lacks_error(self, row: Row) -> bool:
        return self.plan.errors and not self.records.find(self.case, "error", row=row.name)

    def lacks_memory(self, row: Row) -> bool:
        return self.plan.memory and row.trains and not self.records.find(self.case, "memory", row=row.name)

    def rounds_left(self, row: Row, quantity: str) -> list[int]:
        """The missing rounds; empty if the share is resolved."""
        if quantity in ADDITIONS:
            ratios = self.records.ratios(self.case, row, quantity, self.plan.clock)
            if ratios and estimate(ratios).is_resolved:
                return []
        _, rounds = self.plan.quantities(self.case, row)[quantity]
        done = self.records.steps(self.case, row, quantity)
        return [number for number in range(rounds) if number not in done]

    def prepare(self, row: Row) -> None:
        """Makes the measurements that are made once, and builds and warms up the models for the rounds."""
        if self.lacks_error(row):
            self.record("error", row, rotation_error(self.case.settings, row))
        quantities = self.plan.quantities(self.case, row)
        for phase in PHASES:
            wanted = [name for name, (of, _) in quantities.items() if of == phase and self.rounds_left(row, name)]
            needs_memory = phase == "training" and self.lacks_memory(row)
            is_whole = row.name == BASELINE or phase in wanted or needs_memory
            if not wanted and not is_whole:
                continue
            runner = Runner(self.case.settings, row, phase)
            for _ in range(self.plan.warmup if is_whole else 0):
                runner.step()
            if needs_memory:
                self.record("memory", row, runner.peak_memory())
            runner.model.zero_grad(set_to_none=True)
            if row.name == BASELINE:
                self.baselines[phase] = runner
            if phase in wanted:
                self.timers[row, phase] = runner
            for quantity in wanted:
                if quantity in ADDITIONS and phase in self.baselines:
                    self.prepare_addition(row, quantity, runner.model)

    def prepare_addition(self, row: Row, quantity: str, model: nn.Module) -> None:
        settings = self.case.settings
        self.states = self.states or States(settings, model.config)
        addition = Addition(settings, model, self.states, keeps_rotations=quantity != "added_first")
        for _ in range(max(1, self.plan.warmup)):
            addition.seconds(1)
        if row.kind != "peer" and not self.records.find(self.case, "work", row=row.name, of=quantity):
            self.record("work", row, dataclasses.asdict(needed_work(addition)), of=quantity)
        self.timers[row, quantity] = addition

    def take_rounds(self, quantities: Collection[str]) -> None:
        """Measures each timer of these quantities next to `absolute`, in rotating order, until no rounds remain."""
        timers = [key for key in self.timers if key[1] in quantities]
        last = max((number for key in timers for number in self.rounds_left(*key)), default=-1)
        with tqdm(total=last + 1, desc=f"{self.title}: rounds at most", leave=False) as progress:
            for number in range(last + 1):
                left = [key for key in timers if number in self.rounds_left(*key)]
                for phase in PHASES:
                    order = [key for key in left if ADDITIONS.get(key[1], key[1]) == phase]
                    shift = number % max(len(order), 1)
                    ran = None
                    # The order rotates, so that no model always follows the same other model.
                    for row, quantity in order[shift:] + order[:shift]:
                        ran = self.take(number, row, quantity, ran)
                progress.update()

    def take(self, number: int, row: Row, quantity: str, ran: Runner | None) -> Runner | None:
        """Makes one measurement right after one of `absolute`; takes and returns the whole model that ran last."""
        baseline, seconds = self.baselines.get(ADDITIONS.get(quantity, quantity)), {}
        for name, runner in (("baseline", baseline), ("value", self.timers[row, quantity])):
            if isinstance(runner, Runner) and runner is not ran:
                # Warm up the caches, which contain the other model's weights.
                runner.step()
                ran = runner
            if runner is not None:
                seconds[name] = runner.seconds(self.plan.steps)
        self.record(quantity, row, seconds.pop("value"), round=number, **seconds)
        return ran
