"""Writes the carbon atoms of the package biotite's molecules with their handedness, for token_classification.py.

biotite contains the Chemical Component Dictionary of the Protein Data Bank, 49,000 molecules with the places of their
atoms, and R or S for every atom that has a handedness. The package is under the BSD licence, the dictionary in the
public domain:

    pip install biotite
    python training/evidence/carbon_centres.py outputs/centres.npz

The file contains those carbon atoms whose handedness follows from the atoms up to two bonds away, and does so
(training/evidence/data/molecules.py).
"""

import argparse
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from hf_liere.errors import InputError
from training.engine.runs import start
from training.evidence.data.molecules import Molecules, find_centres


# Atomic numbers of the elements in the molecules that are read.
NUMBERS = {
    "H": 1,
    "B": 5,
    "C": 6,
    "N": 7,
    "O": 8,
    "F": 9,
    "SI": 14,
    "P": 15,
    "S": 16,
    "CL": 17,
    "SE": 34,
    "BR": 35,
    "I": 53,
}
ORDERS = {"SING": 1, "DOUB": 2, "TRIP": 3}


def main(arguments: list[str] | None = None) -> Path:
    """Writes the file; returns its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("output", type=Path, help="npz file to write")
    parser.add_argument("--components", type=Path, help="BinaryCIF file of molecules, by default that of biotite")
    given = parser.parse_args(arguments)
    if given.output.suffix != ".npz":
        raise InputError(f"{given.output}: files of centres end with .npz.")
    centres, agrees = find_centres(read_molecules(given.components))
    print(f"Handedness is decided up to two bonds away in {len(agrees)} centres, and agrees in {agrees.sum()}.")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(given.output, **{name: values[agrees] for name, values in vars(centres).items()})
    return given.output


def read_molecules(file: Path | None) -> Molecules:
    """
    The molecules of a BinaryCIF file of chemical components, by default biotite's own, that consist of `NUMBERS`.

    Raises:
        InputError: if biotite is not installed, or the file cannot be read.
    """
    try:
        import biotite
        from biotite.structure.io import pdbx
    except ImportError as error:
        raise InputError(f"{error}; accepted: pip install biotite.") from error
    file = file or Path(biotite.__file__).parent / "structure" / "info" / "components.bcif"
    try:
        block = pdbx.BinaryCIFFile.read(str(file)).block
        atoms, bonds = block["chem_comp_atom"], block["chem_comp_bond"]
        components, names, symbols = (atoms[key].as_array(str) for key in ("comp_id", "atom_id", "type_symbol"))
        axes = [atoms[f"pdbx_model_Cartn_{axis}_ideal"].as_array(float, masked_value=np.nan) for axis in "xyz"]
        handedness = atoms["pdbx_stereo_config"].as_array(str)
        owners, *ends = (bonds[key].as_array(str) for key in ("comp_id", "atom_id_1", "atom_id_2"))
        orders = bonds["value_order"].as_array(str)
    except Exception as error:
        # Bytes of another format end in errors of many classes.
        raise InputError(
            f"{file.name} cannot be read: {error!r}; accepted: chemical components as BinaryCIF."
        ) from error
    numbers = np.array([NUMBERS.get(symbol, 0) for symbol in symbols])
    members = np.unique(components, return_inverse=True)[1]
    kept = np.isin(members, members[numbers == 0], invert=True)
    places = {key: number for number, key in enumerate(zip(components[kept], names[kept]))}
    pairs = np.array([[places.get((owner, name), -1) for name in pair] for owner, *pair in zip(owners, *ends)])
    found = (pairs >= 0).all(axis=1)
    return Molecules(
        *(members[kept], numbers[kept], np.stack(axes, axis=1)[kept], handedness[kept], pairs[found]),
        np.array([ORDERS[order] for order in orders[found]]),
    )


if __name__ == "__main__":
    start(lambda: print(f"Written: {main()}"))
