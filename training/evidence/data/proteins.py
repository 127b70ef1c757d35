"""
Residues of proteins with their neighbours: is a residue part of a helix, of a strand, or of neither?

A sample is a residue and its `NEIGHBOURS` nearest residues in space, by the distance of CA atoms. Its features are
which token the residue is, and the distance of each token from it: neither the kind of a residue nor the order of the
chain. The pose of a residue is the frame of its atoms N, CA and C; its label is that of the file.

With `crop`, every residue of a sample is asked at once, and features are all equal: a sample for training is a residue
with its nearest ones, one of the evaluation a whole chain. No single token has a frame to write all others in.

`ask="rotamer"` asks for the side chain instead: whether its first dihedral angle χ1, of N, CA, CB and the atom after
CB, is nearest to 60°, 180° or −60°. Features then name the kind of the residue or, with `crop`, of all. Glycine and
alanine have no χ1, and the ring of proline leaves it no choice: they are context, and not asked.

Files are those of MDAnalysisTests, in `data/dssp` of its source distribution: 50 chains of the Protein Data Bank with
6,860 residues, `NAME.gz` with the atoms and `NAME.dssp` with one letter for each residue. The package is under the LGPL
3 or later, and structures of the Protein Data Bank are in the public domain. Of the chains in the order of their names,
every fifth is for the evaluation.
"""

import gzip
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hf_liere.errors import InputError
from training.common.arguments import flag
from training.common.tasks import SPLITS, register_task
from training.data.augmentation import IGNORED_LABEL
from training.evidence.data.drawing import StructuresTask
from training.evidence.data.frames import frames_of, turned_columns


TRAINING_SAMPLES = 128000
NEIGHBOURS = 11
# One chain of so many is for the evaluation.
EVALUATED = 5
# Letters of the files.
LABELS = {"H": "helix", "E": "strand", "-": "other"}
ASKED = ("structure", "rotamer")
KINDS = tuple("ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL".split())
ATOMS = ("N", "CA", "C")
BETA = "CB"
# The fourth atom of χ1: the first of these that a residue has.
GAMMAS = ("CG", "CG1", "OG", "OG1", "SG")
# Translations and distances are in units of so many Å, so that most lie between 0 and 1.
UNIT = 10.0


@dataclass(frozen=True)
class Chain:
    """
    Attributes:
        backbone: (residues, 3, 3), the places of N, CA and C in Å.
        labels: one of `LABELS` for each residue.
        kinds: (residues,), indices of `KINDS`.
        rotamers: (residues,), 0 for χ1 nearest to 60°, 1 to 180°, 2 to −60°, `IGNORED_LABEL` without a choice.
    """

    name: str
    backbone: np.ndarray
    labels: str
    kinds: np.ndarray
    rotamers: np.ndarray

    def answers(self, ask: str) -> np.ndarray:
        """(residues,), what the task asks for."""
        return self.rotamers if ask == "rotamer" else np.array([LABELS[letter] for letter in self.labels])


def protein_columns(
    folder: str,
    split: str,
    limit: int | None,
    largest_angle: float,
    crop: int | None = None,
    ask: str = "structure",
) -> dict[str, Any]:
    """
    Args:
        limit: the number of samples; by default all residues once. For training, residues are drawn at random.
        largest_angle: of the random rotation of each sample from the frame of its file, in degrees.
        crop: residues of a sample for training that are all asked; those of the evaluation are then whole chains.
        ask: one of `ASKED`.

    Returns:
        Columns of N = 12 tokens, the residue first: `features` (samples, N, 2) and `labels` (samples,), the names of
        classes; those of [`turned_columns`]. With `crop`, `features` (samples, N, 1) of ones and `labels` (samples, N);
        of whole chains, lists of samples with their own N. For rotamers, `labels` are numbers, and `features` have 20
        further columns, one for each kind of residue.
    """
    seed, chains = SPLITS.index(split), split_chains(read_chains(folder), split)
    if crop is not None and split != "train":
        whole = [[part[:1] for part in neighbourhoods(chain, len(chain.labels), ask)] for chain in chains[:limit]]
        rng = np.random.default_rng((seed, 1))
        columns = [dense_columns(*sample, largest_angle, rng) for sample in whole]
        return {name: [column[name][0] for column in columns] for name in columns[0]}
    size = NEIGHBOURS + 1 if crop is None else crop
    if size > (longest := min(len(chain.labels) for chain in chains)):
        raise InputError(f"--crop {crop}; accepted: up to {longest}, the residues of the shortest chain.")
    found = [np.concatenate(parts) for parts in zip(*(neighbourhoods(chain, size, ask) for chain in chains))]
    if crop is None:
        found = [part[found[-1][:, 0] != IGNORED_LABEL] for part in found]
    residues = len(found[0])
    count = limit or residues
    chosen = np.random.default_rng((seed, 0)).integers(residues, size=count)
    if split != "train":
        chosen = np.arange(min(count, residues))
    rotations, translations, kinds, answers = (part[chosen] for part in found)
    if crop is not None:
        return dense_columns(rotations, translations, kinds, answers, largest_angle, np.random.default_rng((seed, 1)))
    features = np.zeros((*translations.shape[:2], 2), np.float32)
    features[:, 0, 0], features[..., 1] = 1, np.linalg.norm(translations, axis=-1)
    turned = turned_columns(rotations, translations, largest_angle, np.random.default_rng((seed, 1)))
    kinds[:, 1:] = 0
    return {"features": np.concatenate([features, kinds], axis=-1), **turned, "labels": answers[:, 0]}


def dense_columns(
    rotations: np.ndarray,
    translations: np.ndarray,
    kinds: np.ndarray,
    answers: np.ndarray,
    largest_angle: float,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Samples of which every token is asked, about the mean of their places."""
    centred = translations - translations.mean(axis=1, keepdims=True)  # (samples, N, 3)
    features = np.concatenate([np.ones((*answers.shape, 1), np.float32), kinds], axis=-1)  # (samples, N, 1 or 21)
    return {"features": features, **turned_columns(rotations, centred, largest_angle, rng), "labels": answers}


def commonest_rotamer_accuracy(folder: str) -> float:
    """The share of the evaluation's side chains in the rotamer that is commonest for their kind in training."""
    train, evaluation = (_side_chains(split_chains(read_chains(folder), split)) for split in SPLITS[:2])
    counts = np.zeros((len(KINDS), 3), np.int64)
    np.add.at(counts, train, 1)
    kinds, rotamers = evaluation
    return float((counts.argmax(axis=1)[kinds] == rotamers).mean())


def _side_chains(chains: list[Chain]) -> tuple[np.ndarray, np.ndarray]:
    """Kinds and rotamers of all residues that have one."""
    kinds, rotamers = (np.concatenate([getattr(chain, name) for chain in chains]) for name in ("kinds", "rotamers"))
    return kinds[rotamers != IGNORED_LABEL], rotamers[rotamers != IGNORED_LABEL]


@register_task
@dataclass
class Proteins(StructuresTask):
    name = "proteins"
    sizes = {"training": TRAINING_SAMPLES, "evaluation": None}
    crop: int | None = flag(
        None,
        "Ask every residue of a sample of `proteins` at once: of so many for training, a residue and those nearest to "
        "it, and of whole chains for the evaluation.",
    )
    ask: str = flag(
        "structure",
        "What `proteins` asks of a residue: its secondary `structure`, or the `rotamer` of its side chain by the kinds "
        "of residues.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ask not in ASKED:
            raise InputError(f"--ask {self.ask!r}; accepted: {', '.join(ASKED)}.")
        if self.crop is not None and self.crop < 1:
            raise InputError(f"--crop {self.crop}; accepted: 1 or more.")

    def read(self, path: str, split: str, count: int | None, largest_angle: float) -> dict[str, Any]:
        return protein_columns(path, split, count, largest_angle, self.crop, self.ask)


def split_chains(chains: list[Chain], split: str) -> list[Chain]:
    evaluated = chains[EVALUATED - 1 :: EVALUATED]
    return evaluated if split != "train" else [chain for chain in chains if chain not in evaluated]


def neighbourhoods(chain: Chain, size: int, ask: str) -> tuple[np.ndarray, ...]:
    """
    Of every residue and those nearest to it, N = `size`: rotations (residues, N, 3, 3), translations (residues, N, 3)
    from the residue, features of the kinds (residues, N, 0 or 20), and answers (residues, N).
    """
    nitrogens, alphas, carbons = chain.backbone.swapaxes(0, 1)
    rotations = frames_of(alphas, carbons, nitrogens)
    away = alphas - alphas[:, None]  # (residues, residues, 3)
    nearest = np.linalg.norm(away, axis=-1).argsort(axis=1, kind="stable")[:, :size]
    translations = np.take_along_axis(away, nearest[..., None], axis=1) / UNIT
    kinds = np.eye(len(KINDS), dtype=np.float32)[chain.kinds][:, : len(KINDS) * (ask == "rotamer")]
    return rotations[nearest], translations, kinds[nearest], chain.answers(ask)[nearest]


@lru_cache(maxsize=1)
def read_chains(folder: str) -> list[Chain]:
    """
    The chains of a folder, in the order of their names.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    labels = sorted(Path(folder).glob("*.dssp"))
    if len(labels) < EVALUATED:
        raise InputError(
            f"--structures {folder!r} contains {len(labels)} files NAME.dssp; accepted: a folder with at least "
            f"{EVALUATED}, and NAME.gz beside each, such as data/dssp of MDAnalysisTests."
        )
    return [_read_chain(path) for path in labels]


def _read_chain(path: Path) -> Chain:
    letters, *_ = [*path.read_text(encoding="utf-8").split(), ""]
    if unknown := set(letters) - set(LABELS):
        raise InputError(f"{path.name} contains {', '.join(sorted(unknown))}; accepted: {', '.join(LABELS)}.")
    atoms = path.with_suffix(".gz")
    try:
        lines = gzip.decompress(atoms.read_bytes()).decode("ascii").splitlines()
        residues, named = _read_atoms(lines)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{atoms.name} cannot be read: {error}; accepted: atoms in the format PDB.") from error
    incomplete = [name for name, found in residues.items() if not found.keys() >= {*ATOMS}]
    if incomplete:
        raise InputError(f"{atoms.name}: residue {incomplete[0]} lacks one of the atoms {', '.join(ATOMS)}.")
    if unknown := {*named.values()} - {*KINDS}:
        raise InputError(f"{atoms.name} contains residues {', '.join(sorted(unknown))}; accepted: {', '.join(KINDS)}.")
    if len(residues) != len(letters) or len(letters) <= NEIGHBOURS:
        raise InputError(
            f"{atoms.name} has {len(residues)} residues and {path.name} {len(letters)} labels; accepted: as many of "
            f"both, and more than {NEIGHBOURS}."
        )
    backbone = np.array([[found[atom] for atom in ATOMS] for found in residues.values()])
    kinds = np.array([KINDS.index(kind) for kind in named.values()])
    rotamers = np.array([_rotamer(kind, found) for kind, found in zip(named.values(), residues.values())])
    return Chain(path.stem, backbone, letters, kinds, rotamers)


def _rotamer(kind: str, found: dict[str, list[float]]) -> int:
    gamma = next((name for name in GAMMAS if name in found), None)
    if gamma is None or BETA not in found or kind == "PRO":
        return IGNORED_LABEL
    nitrogen, alpha, beta, end = (np.array(found[name]) for name in ("N", "CA", BETA, gamma))
    frame = frames_of(alpha, beta, nitrogen)  # (3, 3), x along the bond that the side chain turns about
    _, y, z = frame.T @ (end - beta)
    # The nitrogen lies at positive y, and angles from y to z are clockwise as seen along the bond.
    return int(np.degrees(np.arctan2(z, y)) % 360 // 120)


def _read_atoms(lines: list[str]) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """
    The first place of every atom of the backbone, of CB and of the one after it, and the first kind, by chain and
    number of the residue, from fixed columns.
    """
    residues: dict[str, dict[str, list[float]]] = {}
    kinds: dict[str, str] = {}
    for line in lines:
        name = line[12:16].strip()
        if line.startswith("ATOM") and name in (*ATOMS, BETA, *GAMMAS):
            place = [float(line[start : start + 8]) for start in (30, 38, 46)]
            residue = line[21:27].strip()
            residues.setdefault(residue, {}).setdefault(name, place)
            kinds.setdefault(residue, line[17:20])
    return residues, kinds
