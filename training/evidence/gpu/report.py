"""The report of gpu_check.py: a Markdown file with one section per check, rewritten after each check."""

import dataclasses
import re
import time
from pathlib import Path

import torch
import transformers

import hf_liere
from hf_liere.errors import InputError
from training.common.records import write_text
from training.evidence.gpu.privacy import remove_secrets
from training.evidence.gpu.record import Lines, comparison_tables, goals_table
from training.evidence.gpu.sections import DESTINATIONS, SECTIONS, Settings
from training.evidence.reporting.markdown import markdown


SECTION = re.compile(r"^## (\w+)\n\n<!-- (\w+), (\d+) s -->\n\n(.*?)\n(?=\n## \w+\n\n<!-- |\Z)", re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Section:
    """The result of a check. `outcome` is passed, failed, unfinished or interrupted; `text` is Markdown."""

    name: str
    outcome: str
    seconds: float
    text: str


def heading(settings: Settings) -> str:
    """Versions and devices, which are the same for all sections of a report."""
    versions = f"hf_liere {hf_liere.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = ", ".join(gpus) if settings.device == "cuda" else "CPU"
    return f"{versions}\n\nDevices: {devices}{' (quick)' if settings.quick else ''}"


class Report:
    """
    Args:
        path: Path of the file.
        heading: See [`heading`].
        go_on: Whether to continue an existing report.

    Raises:
        InputError: if the file exists without `go_on`, or does not have this heading.
    """

    def __init__(self, path: Path, heading: str, go_on: bool):
        self.path, self.heading, self.sections = path, heading, {}
        if path.exists():
            if not go_on:
                raise InputError(f"{path} exists; accepted: --resume, --sections or another --output.")
            text = path.read_text(encoding="utf-8")
            if f"\n{heading}\n" not in text:
                raise InputError(
                    f"{path} is not a report of this machine and these settings ({' '.join(heading.split())}); choose "
                    "another --output."
                )
            for name, outcome, seconds, body in SECTION.findall(text):
                self.sections[name] = Section(name, outcome, float(seconds), body)

    def passed(self, name: str) -> bool:
        return name in self.sections and self.sections[name].outcome == "passed"

    def add(self, section: Section, lines: Lines | None = None) -> None:
        """Writes the report with this section, and with the tables of the record's lines."""
        self.sections[section.name] = dataclasses.replace(section, text=remove_secrets(section.text).strip())
        ordered = [self.sections[name] for name in SECTIONS if name in self.sections]
        rows = [[each.name, each.outcome, f"{each.seconds:.0f} s", DESTINATIONS[each.name]] for each in ordered]
        rows += [[name, "not run", "–", DESTINATIONS[name]] for name in SECTIONS if name not in self.sections]
        parts = ["# GPU check", self.heading, f"Written {time.strftime('%Y-%m-%d %H:%M')}"]
        parts.append(markdown(["section", "outcome", "time", "belongs in"], rows))
        parts += filter(None, [goals_table(lines or []), remove_secrets(comparison_tables(lines or []))])
        for section in ordered:
            parts += [f"## {section.name}", f"<!-- {section.outcome}, {section.seconds:.0f} s -->", section.text or "–"]
        write_text(self.path, "\n\n".join(parts) + "\n")
