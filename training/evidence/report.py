"""Tables and pictures from the results of sweeps, beside the papers' figures.

    python training/evidence/report.py outputs/cifar100/*.jsonl --output_dir outputs/report

Writes report.md and a picture for every sweep. A sentence above each table says what it shows. The comparisons that the
file of a sweep names are tested from five seeds on. A paper's figure is in the row of the same settings; the text above
the table describes its data. `--keep_results` stores compact results beside the report. `results` was written
in this way, and is rewritten from itself, in training/evidence, by

    python report.py results/{,archive/}*/*.jsonl --output_dir results

Results below a folder `archive` get a page of their own there.
"""

import argparse
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from training.common.records import write_text
from training.engine.runs import start
from training.evidence.reporting.conclusions import summarise
from training.evidence.reporting.markdown import markdown
from training.evidence.reporting.result_lines import read_results, write_results
from training.evidence.reporting.sections import Section


PAPER_RESULTS = Path(__file__).with_name("paper_results.yaml")
REPORT, ARCHIVE = "report.md", "archive"
RULE = """
These results left [the report](../report.md) by a rule that does not ask what they show. A section is here if

- it has fewer than five seeds,
- the seeds that a test still needs, five, or 20 where runs are counted, would train for more than half an hour on one
  core, by its records, and
- neither the README nor [Which encoding?](../../../../docs/choosing.md) quotes it, and no default of the package rests
  on it.

Nothing was changed: the sections have their commands, figures and single seeds, and none of them was tested.
[What the results show](../../../../docs/results.md) discusses them. With more seeds, a section returns to the report.
""".strip()
HOW_TO_READ = """
## How to read this page

The bold paragraph of a section says which differences are significant, or what its table shows if nothing was tested.
Accuracies are means over seeds, in percent. Pictures show single seeds as small circles. Tables show them below the
means if there are fewer than ten.

**With fewer than five seeds** there are neither intervals nor tests, and the tables are folded.

**From five seeds on**, intervals are 95% and resample seeds, then draws of an offset if there are five, then examples,
or the groups of examples that the file of the sweep names. They estimate the effect of other seeds and other examples.
Tests are t-tests that contain the variances of all three (Welch's degrees of freedom). Where models of one seed start
with equal outputs and see the same batches, the file of the sweep says `paired`, and seeds are compared in pairs. It
also names the comparisons that are tested, and says in a comment which of them were named after the runs. "Holm" is p
corrected for the number of distinct tests of the sweep. A difference is significant if Holm's p is below 5%. Intervals
are not corrected, so one may exclude 0 where the difference is not significant.

**Chance** is the accuracy that the file of the sweep names, of answers without positions, and baselines at it are left
out. Where it names none, chance is the most frequent class of the evaluation, or 1/2 for an AUC, if the records have
it: two models at chance are not tested. A model is above chance if a seed exceeds it by three standard errors, or the
mean of five seeds does by a test of the same level. Perplexities, losses and average precisions have no chance here.

**For some tasks the report also counts the runs that reach an accuracy**, which the files of their sweeps name. Runs
may end anywhere below it. Evaluated as in training, the shares of seeds, with the intervals of Clopper and Pearson, and
the examples until then say how fast models learn with the given examples, not what they could learn. These tasks are
tested from 20 seeds on: accuracies as above, shares by Fisher's test, and examples by the log-rank test.

**If all n examples are right**, an interval has no width. By the rule of three, 3/n of others could be wrong.
""".strip()


def summary(sections: list[Section]) -> str:
    """All sections in one table: what each compares, its seeds, and what is significant."""
    rows = [
        [
            f"[{one.title}](#{one.anchor}) ({len(one.table)} model{'' if len(one.table) == 1 else 's'})",
            one.folder,
            " or ".join(map(str, one.numbers_of_seeds)),
            summarise(one.found, one.table),
        ]
        for one in sections
    ]
    return markdown(["what was compared", "data", "seeds", "what is significant"], rows)


def index(sections: list[Section]) -> str:
    """All sections of the archive in one table, with what a test of each would still take."""
    rows = [
        [
            f"[{one.title}](#{one.anchor})",
            one.folder,
            " or ".join(map(str, one.numbers_of_seeds)),
            f"{one.missing_hours:.1f}",
        ]
        for one in sections
    ]
    return markdown(["what was compared", "data", "seeds", "hours to a test"], rows)


def write_page(folder: Path, head: list[str], sections: list[Section]) -> Path:
    """Writes a page of sections and their pictures to `folder`; returns the page's path."""
    for one in sections:
        picture = folder / one.folder / f"{one.results[0]['sweep']}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        one.draw(picture)
    path = folder / REPORT
    write_text(path, "\n\n".join([*head, *(one.write() for one in sections)]) + "\n")
    return path


def main(arguments: list[str] | None = None) -> Path:
    """Writes the report of the given files; returns its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="json lines of evaluate_sweep.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--keep_results", action="store_true", help="store the results beside the report")
    given = parser.parse_args(arguments)
    paper = yaml.safe_load(PAPER_RESULTS.read_text(encoding="utf-8"))
    # Read all files before writing anything.
    shown: list[Section] = []
    archived: list[Section] = []
    for path in given.results:
        place = path.absolute().parent
        page = archived if place.parent.name == ARCHIVE else shown
        page.append(Section.read(path, read_results(path), paper))
    archive = given.output_dir / ARCHIVE
    if given.keep_results:
        for folder, page in ((given.output_dir, shown), (archive, archived)):
            for one in page:
                write_results(folder / one.folder / f"{one.results[0]['sweep']}.jsonl", one.results, as_changes=True)
    head = ["# Report", summary(shown)]
    if archived:
        write_page(archive, ["# Archived results", RULE, index(archived)], archived)
        head.append(f"[Archived results]({ARCHIVE}/{REPORT}) has the other {len(archived)} sections, and the rule.")
    return write_page(given.output_dir, [*head, HOW_TO_READ], shown)


if __name__ == "__main__":
    start(lambda: print(f"Report: {main()}"))
