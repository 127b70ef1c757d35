"""Tables and pictures from the results of sweeps, beside the papers' figures.

    python training/evidence/report.py outputs/cifar100/*.jsonl --output_dir outputs/report

Writes report.md and a picture for every sweep. A sentence above each table says what it shows. The comparisons that the
file of a sweep names are tested from five seeds on. A paper's figure is in the row of the same settings; the text above
the table describes its data. `--keep_results` stores compact results beside the report. training/results was written in
this way, and is rewritten from itself by

    python training/evidence/report.py training/results/*/*.jsonl --output_dir training/results
"""

import argparse
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from training.engine.runs import start
from training.evidence.reporting.plots import plot
from training.evidence.reporting.result_lines import read_results, write_results
from training.evidence.reporting.result_table import arrange, common_settings, drop_common
from training.evidence.reporting.sections import section, title_of


PAPER_RESULTS = Path(__file__).with_name("paper_results.yaml")
REPORT = "report.md"
HOW_TO_READ = """
This page lists the results of sweeps. The bold paragraph of a section says which differences are significant, or what
its table shows if nothing was tested. Accuracies are means over seeds, in percent, with the single seeds below them.
Pictures show single seeds as small circles.

**With fewer than five seeds** there are neither intervals nor tests.

**From five seeds on**, intervals are 95% and resample seeds, then draws of an offset if there are five, then examples.
They estimate the effect of other seeds and other examples. Tests are t-tests that contain the variances of all three
(Welch's degrees of freedom). Where models of one seed start with equal outputs and see the same batches, the file of
the sweep says `paired`, and seeds are compared in pairs. It also names the comparisons that are tested. "Holm" is p
corrected for the number of distinct tests of the sweep. A difference is significant if Holm's p is below 5%. Baselines
at chance are left out.

**For some tasks the report also counts the runs that reach an accuracy**, which the files of their sweeps name. Runs
may end anywhere below it. Evaluated as in training, the shares of seeds, with the intervals of Clopper and Pearson, and
the examples until then say how fast models learn with the given examples, not what they could learn. These tasks are
tested from 20 seeds on: accuracies as above, shares by Fisher's test, and examples by the log-rank test.

**If all n examples are right**, an interval has no width. By the rule of three, 3/n of others could be wrong.
""".strip()


def main(arguments: list[str] | None = None) -> Path:
    """Writes the report of the given files; returns its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="json lines of evaluate_sweep.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--keep_results", action="store_true", help="store the results beside the report")
    given = parser.parse_args(arguments)
    # Read all files before writing anything.
    files = [(path, read_results(path)) for path in given.results]
    paper = yaml.safe_load(PAPER_RESULTS.read_text(encoding="utf-8"))
    given.output_dir.mkdir(parents=True, exist_ok=True)
    parts = ["# Report", HOW_TO_READ]
    for path, results in files:
        folder, name = path.absolute().parent.name, results[0]["sweep"]
        if given.keep_results:
            write_results(given.output_dir / folder / f"{name}.jsonl", results, as_changes=True)
        table = arrange(results)
        common = common_settings(table)
        table = {drop_common(row, common): cells for row, cells in table.items()}
        parts.append(section(path, results, table, paper.get(name, {}), common))
        picture = given.output_dir / folder / f"{name}.png"
        picture.parent.mkdir(exist_ok=True)
        plot(table, title_of(folder, results, table, common), picture)
        parts.append(f"![{folder}: {name}]({folder}/{picture.name})")
    report = given.output_dir / REPORT
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    start(lambda: print(f"Report: {main()}"))
