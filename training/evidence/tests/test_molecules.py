"""Carbon atoms that are centres of molecules, from tables of atoms and bonds and from files of biotite."""

import sys

import networkx
import numpy as np
import pytest

from hf_liere.errors import InputError
from training.evidence import carbon_centres
from training.evidence.data import handedness, molecules


# Ideal coordinates of L-alanine, whose CA atom is S, from the Chemical Component Dictionary.
ALANINE = {
    "N": (7, (-0.966, 0.493, 1.5)),
    "CA": (6, (0.257, 0.418, 0.692)),
    "C": (6, (-0.094, 0.017, -0.716)),
    "O": (8, (-1.056, -0.682, -0.923)),
    "CB": (6, (1.204, -0.62, 1.296)),
    "OXT": (8, (0.661, 0.439, -1.742)),
    "H": (1, (-1.383, -0.425, 1.482)),
    "H2": (1, (-0.676, 0.661, 2.452)),
    "HA": (1, (0.746, 1.392, 0.682)),
    "HB1": (1, (1.459, -0.33, 2.316)),
    "HB2": (1, (0.715, -1.594, 1.307)),
    "HB3": (1, (2.113, -0.676, 0.697)),
    "HXT": (1, (0.435, 0.182, -2.647)),
}


BONDS = "N-CA N-H N-H2 CA-C CA-CB CA-HA C=O C-OXT CB-HB1 CB-HB2 CB-HB3 OXT-HXT".split()


def alanines():
    """L-alanine and its mirror image as one table of molecules."""
    names, (numbers, places) = [*ALANINE], map(np.array, zip(*ALANINE.values()))
    pairs = [(bond.replace("=", "-").split("-"), 2 if "=" in bond else 1) for bond in BONDS]
    bonds = np.array([[names.index(name) for name in ends] for ends, _ in pairs])
    letters = np.where(np.array(names) == "CA", "S", "N")
    return molecules.Molecules(
        members=np.repeat([0, 1], len(names)),
        numbers=np.tile(numbers, 2),
        places=np.concatenate([places, places * [-1, 1, 1]]),
        handedness=np.concatenate([letters, np.where(letters == "S", "R", "N")]),
        bonds=np.concatenate([bonds, bonds + len(names)]),
        orders=np.tile([order for _, order in pairs], 2),
    )


def test_alanine_is_s_and_its_mirror_image_r():
    centres, agrees = molecules.find_centres(alanines())
    assert agrees.all() and centres.is_r.tolist() == [False, True]
    assert centres.numbers.tolist() == [[7, 6, 6, 1]] * 2
    # Of C: O by a double bond counts twice. Its further atoms are O and OXT, in Å from CA.
    assert centres.spheres[0].tolist() == [
        *([6, 1, 1, 0, 0, 0, 0, 0], [8, 8, 8, 6, 0, 0, 0, 0], [6, 1, 1, 1, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0, 0, 0]),
    ]
    origin = np.array(ALANINE["CA"][1])
    np.testing.assert_allclose(centres.further[0, 1, :2], np.array([ALANINE[k][1] for k in ("O", "OXT")]) - origin)
    assert np.isnan(centres.further[0, 1, 2]).all() and np.isnan(centres.further[0, 3]).all()
    wrong = alanines()
    wrong.handedness[wrong.handedness == "S"] = "R"
    assert molecules.find_centres(wrong)[1].tolist() == [False, True]


def test_atoms_with_equal_neighbours_or_unknown_places_are_no_centres():
    unknown, equal = alanines(), alanines()
    unknown.places[[*ALANINE].index("HA")] = np.nan
    # Hydrogen in the place of CB, beside HA.
    equal.numbers[[*ALANINE].index("CB")] = 1
    equal.bonds[8:11] = equal.bonds[7]
    for given in (unknown, equal):
        assert molecules.find_centres(given)[0].is_r.tolist() == [True]


def test_scaffolds_are_those_of_networkx():
    """Equal keys for equal rings and links, with their elements; in any order of the atoms, without side chains."""
    rng = np.random.default_rng(0)
    graphs = []
    for _ in range(60):
        graph = networkx.cycle_graph(int(rng.integers(3, 6)))
        if rng.random() < 0.5:
            graph = networkx.disjoint_union(graph, networkx.cycle_graph(3))
            graph.add_edge(0, len(graph) - 1)
        networkx.set_node_attributes(graph, {node: int(rng.choice([6, 7], p=[0.9, 0.1])) for node in graph}, "number")
        for _ in range(int(rng.integers(4))):
            node = len(graph)
            graph.add_edge(int(rng.integers(node)), node)
            graph.nodes[node]["number"] = int(rng.choice([1, 6, 8]))
        order = rng.permutation(len(graph)).tolist()
        graphs.append(networkx.relabel_nodes(graph, dict(zip(graph, order))))
    graphs.append(networkx.path_graph(4))
    networkx.set_node_attributes(graphs[-1], 6, "number")
    starts = np.cumsum([0, *map(len, graphs)])
    numbers = np.concatenate([[graph.nodes[node]["number"] for node in range(len(graph))] for graph in graphs])
    bonds = np.concatenate([np.array(graph.edges) + start for graph, start in zip(graphs, starts)])
    empty = np.zeros((len(numbers), 3))
    members = np.repeat(np.arange(len(graphs)), [len(graph) for graph in graphs])
    given = molecules.Molecules(members, numbers, empty, np.full(len(numbers), "N"), bonds, np.ones(len(bonds), int))
    keys = molecules.scaffolds(given, molecules._bonded(given)[0])
    cores = [
        networkx.k_core(graph.subgraph([node for node, kind in graph.nodes(data="number") if kind > 1]), 2)
        for graph in graphs
    ]
    same = networkx.isomorphism.categorical_node_match("number", 0)
    expected = [[networkx.is_isomorphic(one, other, node_match=same) for other in cores] for one in cores]
    np.testing.assert_array_equal(keys[:, None] == keys, expected)
    assert keys[-1] == 0 and 5 < len(set(keys)) < 50


def test_molecules_of_a_file_of_biotite(tmp_path, capsys):
    """Alanine as BinaryCIF, and a molecule with an element that is not read."""
    pdbx = pytest.importorskip("biotite.structure.io.pdbx", reason="biotite is not installed")
    symbols = {1: "H", 6: "C", 7: "N", 8: "O"}
    names = [*ALANINE, "ZN"]
    places = np.array([*(place for _, place in ALANINE.values()), (0, 0, 0)])
    block = {
        "chem_comp_atom": {
            "comp_id": ["ALA"] * len(ALANINE) + ["ZN"],
            "atom_id": names,
            "type_symbol": [*(symbols[number] for number, _ in ALANINE.values()), "ZN"],
            "pdbx_stereo_config": ["S" if name == "CA" else "N" for name in names],
        }
        | {f"pdbx_model_Cartn_{axis}_ideal": column for axis, column in zip("xyz", places.T)},
        "chem_comp_bond": {
            "comp_id": ["ALA"] * len(BONDS),
            "atom_id_1": [bond.replace("=", "-").split("-")[0] for bond in BONDS],
            "atom_id_2": [bond.replace("=", "-").split("-")[1] for bond in BONDS],
            "value_order": ["DOUB" if "=" in bond else "SING" for bond in BONDS],
        },
    }
    file = pdbx.BinaryCIFFile()
    file["components"] = pdbx.BinaryCIFBlock(
        {name: pdbx.BinaryCIFCategory({key: np.array(v) for key, v in rows.items()}) for name, rows in block.items()}
    )
    file.write(str(tmp_path / "components.bcif"))
    carbon_centres.main([str(tmp_path / "new" / "a.npz"), "--components", str(tmp_path / "components.bcif")])
    assert "in 1 centres, and agrees in 1." in capsys.readouterr().out
    expected = molecules.find_centres(alanines())[0]
    for name, values in vars(handedness.read_centres(str(tmp_path / "new" / "a.npz"))).items():
        np.testing.assert_array_equal(values, getattr(expected, name)[:1], err_msg=name)
    (tmp_path / "bad.bcif").write_text("no file")
    with pytest.raises(InputError, match="bad.bcif cannot be read: .*; accepted: chemical components as BinaryCIF"):
        carbon_centres.read_molecules(tmp_path / "bad.bcif")


def test_carbon_centres_without_biotite(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="a.txt: files of centres end with .npz"):
        carbon_centres.main([str(tmp_path / "a.txt")])
    monkeypatch.setitem(sys.modules, "biotite", None)
    with pytest.raises(InputError, match="biotite.*; accepted: pip install biotite"):
        carbon_centres.main([str(tmp_path / "a.npz")])
