"""Tables and numbers in markdown."""

import re


# A bar that does not end its cell.
BAR = r"\|"


def markdown(header: list[str], rows: list[list[str]], rule: str = "---") -> str:
    """A table whose first column is aligned to the left, and the others as `rule` says."""
    lines = [header, ["---", *[rule] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |" for cells in lines)


def minus(text: str) -> str:
    """The number with a minus sign, and zero without a sign."""
    return (text if re.search("[1-9]", text) else text.lstrip("+-")).replace("-", "−")
