"""Tables and numbers in markdown."""

import re


def markdown(header: list[str], rows: list[list[str]], rule: str = "---") -> str:
    """A table whose first column is aligned to the left, and the others as `rule` says."""
    lines = [header, ["---", *[rule] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(escaped(cell) for cell in cells)} |" for cells in lines)


def escaped(cell: str) -> str:
    """A cell whose bars do not end it."""
    return cell.replace("|", r"\|")


def minus(text: str) -> str:
    """The number with a minus sign, and zero without a sign."""
    return (text if re.search("[1-9]", text) else text.lstrip("+-")).replace("-", "−")
