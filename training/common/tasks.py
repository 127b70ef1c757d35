"""
Tasks: data sets that a file of their own draws or reads, by their name in `--dataset_name`. Scripts import the file
first (`--register my_task.py`), as they do with encodings of users; docs/training.md has an example.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hf_liere.errors import InputError
from hf_liere.registers import Register, closest


Kind = TypeVar("Kind", bound=type["Task"])
TASKS = Register("dataset_name")
# Of most tasks: for training, for evaluation, and for the data sets that are published.
SPLITS = ("train", "validation", "test")


class Task:
    """
    A task. The fields of its dataclass are flags of the script, beside those of the script's own data.

    Attributes:
        name: the value of `--dataset_name`.
        inputs: `tokens`, `images` or `clips`: which script has it.
        sizes: numbers of samples of `training` and `evaluation` without `--max_train_samples` and
            `--max_eval_samples`; `None` for as many as there are.
        labels: names of the classes of images and clips.
    """

    name: ClassVar[str]
    inputs: ClassVar[str]
    sizes: ClassVar[dict[str, int | None]]
    labels: ClassVar[tuple[str, ...]] = ()

    def count(self, part: str) -> int | None:
        """The number of samples of a part that the flags ask for."""
        return self.limits[part] or self.sizes[part]  # type: ignore[attr-defined]

    def split(self, part: str) -> str:
        return SPLITS[part == "evaluation"]

    def samples(self, part: str, request: Any = None) -> Any:
        """
        The samples of `training` or `evaluation`: columns of tokens, by name (`features`, `positions`, `labels`, …), or
        a source of images or clips.

        Args:
            request: the [`DataRequest`] of images and clips.

        Raises:
            ValueError: for a request, or settings, that the task does not have.
        """
        raise NotImplementedError


def register_task(kind: Kind) -> Kind:
    """Decorator that makes a subclass of [`Task`] a value of `--dataset_name`; `ValueError` for the name of another."""
    TASKS.register(kind.name, kind)
    return kind


def with_task(kind: type, name: str | None) -> type:
    """The class of a script's data arguments, with the flags of the task if `name` is one of the script's."""
    task = TASKS.get(name)
    if task is None or task.inputs != getattr(kind, "inputs", None):
        return kind
    return dataclass(type(kind.__name__, (task, kind), {"__module__": kind.__module__}))


def require_task(arguments: Any, *others: str) -> None:
    """Raises [`InputError`] if `--dataset_name` is neither a task of the script nor one of the other names."""
    name = arguments.dataset_name
    if name in (None, *others) or isinstance(arguments, Task):
        return
    accepted = [*others, *(other for other, task in TASKS.items() if task.inputs == arguments.inputs)]
    raise InputError(
        f"--dataset_name {name!r}{closest(name, accepted)}; accepted: {', '.join(accepted)}, or a task of --register."
    )


def draw_samples(task: Task, part: str, request: Any = None) -> Any:
    """The samples of a part. Raises [`InputError`] for what the task refuses."""
    try:
        return task.samples(part, request)
    except ValueError as error:
        raise InputError(str(error)) from None
