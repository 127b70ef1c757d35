"""Tables in markdown."""


def markdown(header: list[str], rows: list[list[str]], rule: str = "---") -> str:
    """A table whose first column is aligned to the left, and the others as `rule` says."""
    lines = [header, ["---", *[rule] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
