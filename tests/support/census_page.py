"""The page of the census of models with RoPE, from its record."""

import re

from checkout import ROOT


PAGE = ROOT / "docs" / "reference" / "which_models.md"
INTRODUCTION = """# Which models

<!-- Made by tests/support/rope_census.py; a test compares it with tests/goldens/rope_census.json. -->

`patch` accepts these model types of Transformers {version} with `rotary_init="pretrained"`
([Models with RoPE](../pretrained.md#models-with-rope)). We tried each type in its default configuration; another
configuration may rotate in another way.

| model types | number |
|---|---:|
| in Transformers | {types} |
| built from their default configuration | {built} |
| that rotate queries and keys | {rotating} |
| that accept learned frequencies (`rope_mixed`) | {planes} |
| that accept learned blocks (`liere`, `block_size=4`) | {blocks} |
| of which we ran a small model | {run} |

## Find your model

- **run**: we patched and ran a small random model of the type. It starts with the same bits (frequencies) or within
  rounding (blocks), every layer with parameters gets a gradient, and after a step of training, text generated with a
  cache has the logits of a pass over all tokens. The text of a model with several towers may reach only some of them;
  the vision tower usually has a type of its own.
- **plan**: `patch` accepts the model, but we ran no small model whose inputs reach the learned parameters.
- **axes** are those of the positions, tower by tower.
"""


def make_page(record: dict) -> str:
    rows = record["rows"]
    built = [row for row in rows if "class" in row]
    rotating = [row for row in built if row["rotates"] and not is_added(row) and row["type"] not in NO_ROTATION]
    counts = {name: sum(row.get(name) == "yes" for row in rotating) for name in KINDS}
    sizes = {"types": len(rows), "built": len(built), "rotating": len(rotating), **counts}
    run = sum(is_run(row, "planes") for row in rotating)
    lines = [INTRODUCTION.format(version=record["transformers"], run=run, **sizes)]
    lines += [":::{container} searchable", "", "| model type | frequencies | blocks | axes | class | why refused |"]
    lines += ["|---|---|---|---|---|---|", *map(make_row, rotating), "", ":::"]
    lines += ["", "## Refused in other configurations, or as parts", "", "| what | why |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in OTHERS.items()]
    lines += ["", "## No rotation", "", "These do not rotate queries and keys by their positions.", ""]
    lines += ["| model type | why |", "|---|---|"]
    lines += [f"| {row['type']} | {NO_ROTATION[row['type']]} |" for row in built if row["type"] in NO_ROTATION]
    lines += ["", "## Frequencies that are added", ""]
    lines += ["These have modules with frequencies that make sinusoids to add, and rotate nothing by them.", ""]
    lines += ["| model type | module |", "|---|---|"]
    lines += [f"| {row['type']} | {row['rotates']} |" for row in built if row["rotates"] and is_added(row)]
    lines += ["", "## Not built", "", "The default configurations of these model types make no model.", ""]
    not_built = make_columns([row["type"] for row in rows if "class" not in row])
    lines += ["<details>", "<summary>Their names</summary>", "", *not_built, "", "</details>"]
    if missing := sorted(set(record["types"]) - {row["type"] for row in rows}):
        lines += ["", "## Not tried yet", "", *make_columns(missing)]
    return "\n".join(lines) + "\n\n`python tests/support/rope_census.py` makes this page again.\n"


def make_row(row: dict) -> str:
    reasons = {name: explain(row, name) for name in KINDS if row.get(name) != "yes"}
    different = [f"{KINDS[name]}: {reason}" for name, reason in reasons.items()]
    alike = len(reasons) == 2 and len(set(reasons.values())) == 1
    why = reasons["planes"] if alike else "; ".join(different)
    axes = ", ".join(str(axes) for _, axes, _ in row.get("towers", []))
    cells = row["type"], *(describe(row, name) for name in KINDS), axes or "–", row["class"], why
    return f"| {' | '.join(cells)} |"


def make_columns(names: list[str], number: int = 4) -> list[str]:
    """A table of names without a head."""
    rows = [[*names[i : i + number], *[""] * number][:number] for i in range(0, len(names), number)]
    return ["| " + " | ".join(row) + " |" for row in [[""] * number, ["---"] * number, *rows]]


# Of refusals whose message alone does not tell users why.
TABLE = "stores a table of sines and cosines, and no frequencies"
EXPLANATIONS = {
    "clvp": "rotates values as well as queries and keys, by angles that are not passed as cos and sin",
    "codegen": TABLE,
    "deepseek_v4": "rotates values too, and compressed keys by other rotary modules inside attention",
    "efficientloftr": "the rotary module takes features of an image, and no positions",
    "gptj": TABLE,
    "idefics": "attention to images has a rotary module that it does not use, and cannot be called with tokens alone",
    "lightglue": "the frequencies are weights of the model already: a projection of the coordinates of keypoints",
    "phimoe": "the rotary module computes its frequencies in every forward pass, and ignores those that it stores",
    "roformer": TABLE,
}
OTHERS = {
    "Llama 4 vision": "stores a table of rotations, and no frequencies",
    "Diffusion Gemma, but for its vision tower": "the decoder reads keys of the encoder, which another module rotates",
    "assistants of Gemma 4": "all of their layers read the keys of another model",
    "blocks for `dynamic` and `longrope`": "blocks contain the frequencies, which are others for longer inputs",
}
CANCELS = "a head rotates its queries and keys by one angle, whatever their positions; it cancels in products"
NO_ROTATION = {
    "neucodec": CANCELS,
    "vjepa2": "turns the two channels of a plane by different angles, which multiplies lengths by 0 to √2",
    "xcodec2": CANCELS,
    "zamba2": "the default configuration does not rotate; with `use_mem_rope=True`, both are accepted",
}
KINDS = {"planes": "frequencies", "blocks": "blocks"}


def is_added(row: dict) -> bool:
    """Whether the module with frequencies is not a rotary one, by the name of its class."""
    return row.get("planes") != "yes" and not re.search(r"rot|rope|attention|layer|vision|model", row["rotates"], re.I)


def is_run(row: dict, name: str) -> bool:
    """Whether a small model was run, and the inputs reached a tower that learns."""
    found = row.get(f"{name}_run", {})
    return bool(found.get("gradients") or find_faults(found))


def describe(row: dict, name: str) -> str:
    """`run`, `plan` or `refused`, and what went wrong in a run."""
    if row.get(name) != "yes":
        return "refused"
    if not is_run(row, name):
        return "plan"
    found = row[f"{name}_run"]
    # Where the model itself does not generate with these tokens.
    return ", ".join(["run", *find_faults(found), *(["no cache"] if isinstance(found.get("cache"), str) else [])])


def find_faults(found: dict) -> list[str]:
    """What a run did not show that it should have."""
    faults = [found["error"]] if "error" in found else []
    faults += [name for name in ("start", "cache") if found.get(name) is False]
    gradients = found.get("gradients", {})
    return [*faults, *(f"no gradient in {tower}" for tower, has in gradients.items() if not has)]


def explain(row: dict, name: str) -> str:
    return EXPLANATIONS.get(row["type"]) or strip_reason(row.get(name) or row["error"])


def strip_reason(text: str) -> str:
    """A refusal without what is accepted instead."""
    return re.split(r"[;.:] [Aa]ccepted", text)[0].replace("|", "\\|").rstrip(".")
