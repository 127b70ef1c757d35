"""Chains of proteins and carbon atoms of molecules, drawn at random, in files of the formats of the packages."""

import gzip

import numpy as np

from training.evidence.data.molecules import Centres
from training.evidence.data.proteins import KINDS


RESIDUES = 20
# Flags of a short run.
SMALL = ["--max_train_samples", "128", "--max_eval_samples", "24", "--use_cpu", "true", "--disable_tqdm", "true"]


def backbone_of(seed):
    """Places of N, CA and C of a chain (residues, 3, 3), rounded as in files."""
    rng = np.random.default_rng(seed)
    alphas = np.cumsum(rng.normal(size=(RESIDUES, 1, 3)) * 2, axis=0)
    return np.round(alphas + [[1.4], [0], [1.5]] * rng.normal(size=(RESIDUES, 3, 3)) * [[1], [0], [1]], 3)


def side_chains_of(seed):
    """Of each residue of the chain its kind, and names and places of the atoms from CB on."""
    rng, named = np.random.default_rng((seed, 1)), {"SER": "OG", "THR": "OG1", "CYS": "SG", "VAL": "CG1", "ILE": "CG1"}
    for kind in rng.choice(KINDS, RESIDUES):
        places = np.round(rng.normal(size=(2, 3)) * 3, 3)
        yield kind, dict(zip(("CB", named.get(kind, "CG")), places[: {"GLY": 0, "ALA": 1}.get(kind, 2)]))


def atom(number, name, residue, place, kind="ATOM", alternative=" ", amino="GLY"):
    x, y, z = place
    return f"{kind:6}{number:5}  {name:3}{alternative}{amino} A{residue:>4}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00 20.00"


def write_chains(folder, count=5):
    """Chains with random letters, side chains, water and atoms that have two places; their backbones and letters."""
    folder.mkdir(exist_ok=True)
    written = {}
    for seed in range(count):
        backbone = backbone_of(seed)
        lines = ["HEADER    A CHAIN"]
        for residue, (places, (amino, side)) in enumerate(zip(backbone, side_chains_of(seed)), 1):
            atoms = dict(zip(("N", "CA", "C", "O"), [*places, places.mean(axis=0)])) | side
            for number, (name, place) in enumerate(atoms.items()):
                lines.append(atom(number, name, residue, place, "ATOM", "A" if name == "N" else " ", amino))
            lines.append(atom(9, "N", residue, places[0] + 5, "ATOM", "B", amino))
        lines.append(atom(5, "CA", 900, (0, 0, 0), kind="HETATM"))
        letters = "".join(np.random.default_rng(seed).choice([*"HE-"], RESIDUES))
        (folder / f"{seed}.dssp").write_text(f"{letters} {seed}\n")
        (folder / f"{seed}.gz").write_bytes(gzip.compress("\n".join([*lines, "TER"]).encode()))
        written[str(seed)] = backbone, letters
    return written


def write_centres(path, count=60):
    """Centres with random places and elements, whose handedness is that of their places."""
    rng = np.random.default_rng(0)
    # At the corners of a tetrahedron, up to a few degrees.
    corners = np.array([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    places = corners * rng.uniform(0.6, 0.9, (count, 4, 1)) + 0.1 * rng.normal(size=(count, 4, 3))
    places = rng.permuted(places, axis=1)
    numbers = rng.permuted(np.tile([1, 6, 7, 8], (count, 1)), axis=1)
    further = places[:, :, None] * 2 + rng.normal(size=(count, 4, 3, 3))
    further[numbers == 1] = np.nan
    spheres = -np.sort(-np.pad(rng.choice([1, 6, 8], (count, 4, 3)), ((0, 0), (0, 0), (0, 5))), axis=-1)
    is_r = is_clockwise(np.take_along_axis(places, numbers.argsort(axis=1)[:, ::-1, None], axis=1))
    scaffolds = rng.integers(20, size=count).astype(np.uint64)
    centres = Centres(numbers, spheres, places, further, is_r, scaffolds)
    np.savez(path, **vars(centres))
    return centres


def is_clockwise(places):
    """Whether the first three of (…, 4, 3) places follow each other clockwise, by their angles about the last one."""
    view = places - places[..., :3, :].mean(axis=-2, keepdims=True)
    axis = -view[..., 3, :] / np.linalg.norm(view[..., 3, :], axis=-1, keepdims=True)
    right = np.cross(axis, view[..., 0, :])
    right /= np.linalg.norm(right, axis=-1, keepdims=True)
    up = np.cross(axis, right)
    # Seen against `axis`, `right` and `up` are a right-handed system of the plane.
    turns = np.arctan2((view[..., :3, :] * up[..., None, :]).sum(-1), (view[..., :3, :] * right[..., None, :]).sum(-1))
    return (turns[..., 1] - turns[..., 0]) % (2 * np.pi) > (turns[..., 2] - turns[..., 0]) % (2 * np.pi)
