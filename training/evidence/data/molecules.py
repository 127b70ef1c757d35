"""
Carbon atoms of molecules with their handedness, R or S, and the scaffolds of their molecules.

R and S say which way round the neighbours of an atom are. Seen with the neighbour of the lowest priority behind, the
others follow each other clockwise by falling priority (R) or not (S). A neighbour with a larger atomic number has a
higher priority. Between equal ones, those decide that are bound to them, atoms of double bonds counted twice (Cahn,
Ingold and Prelog).
"""

from dataclasses import dataclass

import numpy as np


CARBON = 6
# Neighbours of a carbon atom with a handedness, and others of each neighbour that are kept.
NEIGHBOURS, FURTHER = 4, 3
# Largest number of atoms bound to a neighbour that are counted; with the neighbour's own they fit into 63 bits.
SPHERE, BITS = 8, 7
# Steps between atoms that the key of a scaffold sees.
STEPS = 8


@dataclass(frozen=True)
class Molecules:
    """
    Attributes:
        members: (atoms,), the number of the molecule of each atom.
        numbers: (atoms,), atomic numbers.
        places: (atoms, 3), in Å; NaN where unknown.
        handedness: (atoms,), "R", "S" or another letter.
        bonds: (bonds, 2), numbers of atoms.
        orders: (bonds,), 1, 2 or 3.
    """

    members: np.ndarray
    numbers: np.ndarray
    places: np.ndarray
    handedness: np.ndarray
    bonds: np.ndarray
    orders: np.ndarray


@dataclass(frozen=True)
class Centres:
    """
    Carbon atoms with a handedness.

    Attributes:
        numbers: (centres, 4), atomic numbers of the neighbours, in the order of the file.
        spheres: (centres, 4, 8), those of the atoms bound to each neighbour in descending order, atoms of double and
            triple bonds repeated; 0 where there are fewer.
        places: (centres, 4, 3), of the neighbours, in Å from the centre.
        further: (centres, 4, 3, 3), of up to three other atoms bound to each neighbour; NaN where there are fewer.
        is_r: (centres,), whether the file says R.
        scaffolds: (centres,), uint64, equal in molecules with equal scaffolds, 0 in those without rings.
    """

    numbers: np.ndarray
    spheres: np.ndarray
    places: np.ndarray
    further: np.ndarray
    is_r: np.ndarray
    scaffolds: np.ndarray


def find_centres(molecules: Molecules) -> tuple[Centres, np.ndarray]:
    """
    The carbon atoms with a handedness whose four neighbours have known places, and different priorities by their own
    numbers and those of the atoms bound to them.

    Returns:
        The centres, and for each whether its handedness is that of the places of its neighbours, (centres,).
    """
    bonded, orders = _bonded(molecules)  # (atoms, most)
    is_known = np.isin(molecules.handedness, ("R", "S")) & (molecules.numbers == CARBON)
    chosen = np.flatnonzero(is_known & ((bonded >= 0).sum(axis=1) == NEIGHBOURS))
    neighbours = bonded[chosen, :NEIGHBOURS]  # (centres, 4)
    numbers, around = molecules.numbers[neighbours], bonded[neighbours]  # (centres, 4, most)
    repeated = [np.where(orders[neighbours] >= order, molecules.numbers[around], 0) for order in (1, 2, 3)]
    spheres = -np.sort(-np.concatenate(repeated, axis=-1), axis=-1)[..., :SPHERE]
    others = np.where(around == chosen[:, None, None], -1, around)
    others = np.take_along_axis(others, (others < 0).argsort(axis=-1, kind="stable"), axis=-1)[..., :FURTHER]
    origins = molecules.places[chosen]
    places = molecules.places[neighbours] - origins[:, None]
    further = molecules.places[others] - origins[:, None, None]
    further[others < 0] = np.nan
    ranks = priorities(numbers, spheres)
    is_decided = (np.diff(np.sort(ranks, axis=1), axis=1) > 0).all(axis=1) & np.isfinite(places).all(axis=(1, 2))
    is_r = molecules.handedness[chosen] == "R"
    found = numbers, spheres, places, further, is_r, scaffolds(molecules, bonded)[molecules.members[chosen]]
    centres = Centres(*(values[is_decided] for values in found))
    falling = np.take_along_axis(centres.places, ranks[is_decided].argsort(axis=1)[:, ::-1, None], axis=1)
    return centres, are_clockwise(falling) == centres.is_r


def priorities(numbers: np.ndarray, spheres: np.ndarray) -> np.ndarray:
    """Numbers in the order of the priorities of neighbours, from the fields of [`Centres`]."""
    ranks = numbers.astype(np.int64)
    for digit in np.moveaxis(spheres, -1, 0):
        ranks = (ranks << BITS) + digit
    return ranks


def are_clockwise(places: np.ndarray) -> np.ndarray:
    """Whether the first three of (…, 4, 3) places follow each other clockwise, seen with the last one behind."""
    return np.linalg.det(places[..., :3, :] - places[..., 3:, :]) < 0


def _bonded(molecules: Molecules) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the atoms that each atom is bound to, −1 where there are fewer, and the orders of these bonds."""
    both, orders = np.concatenate([molecules.bonds, molecules.bonds[:, ::-1]]), np.tile(molecules.orders, 2)
    order = np.lexsort((both[:, 1], both[:, 0]))
    (atoms, others), orders = both[order].T, orders[order]
    counts = np.bincount(atoms, minlength=len(molecules.numbers))
    columns = np.arange(len(atoms)) - np.repeat(counts.cumsum() - counts, counts)
    bonded, of_bonds = (np.full((len(counts), counts.max()), empty) for empty in (-1, 0))
    bonded[atoms, columns], of_bonds[atoms, columns] = others, orders
    return bonded, of_bonds


def scaffolds(molecules: Molecules, bonded: np.ndarray) -> np.ndarray:
    """
    A key of the scaffold of each molecule, (molecules,): of what is left of it without hydrogen and, again and again,
    without atoms that are bound to one other at most (Bemis and Murcko). Keys are sums over atoms, refined from
    neighbour to neighbour (Weisfeiler and Leman), so that they do not depend on an order; 0 for molecules without
    rings.
    """
    kept, before = molecules.numbers > 1, -1
    while before != (before := int(kept.sum())):
        kept &= (np.append(kept, False)[bonded]).sum(axis=1) > 1
    keys = np.where(kept, _mix(molecules.numbers.astype(np.uint64)), np.uint64(0))
    for _ in range(STEPS):
        around = _mix(np.append(keys, np.uint64(0)))[bonded].sum(axis=1, dtype=np.uint64)
        keys = np.where(kept, _mix(3 * keys + around), np.uint64(0))
    found = np.zeros(molecules.members.max() + 1, np.uint64)
    np.add.at(found, molecules.members, _mix(keys))
    return found


def _mix(keys: np.ndarray) -> np.ndarray:
    """A permutation of the 64-bit numbers without a pattern, which keeps 0 (the finaliser of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return keys ^ (keys >> np.uint64(31))
