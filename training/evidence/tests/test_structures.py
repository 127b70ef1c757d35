"""Residues and carbon atoms of real structures, read from files of their formats that these tests write."""

import gzip
import json

import numpy as np
import pytest
from checkout import ROOT
from scipy.spatial.transform import Rotation
from structures import RESIDUES, SMALL, atom, is_clockwise, side_chains_of, write_centres, write_chains

from hf_liere.errors import InputError
from training import token_classification
from training.common.tasks import with_task
from training.data.tokens import TokenDataArguments, load_tokens
from training.evidence.data import frames, handedness, proteins


def relative(columns):
    """Rotations and translations of all tokens as seen from each (samples, N, N, …), in float64."""
    rotations = columns["matrices"].astype(np.float64).reshape(*columns["matrices"].shape[:2], 3, 3)
    inverse = rotations.swapaxes(-1, -2)[:, :, None]
    places = columns["translations"].astype(np.float64)
    return inverse @ rotations[:, None], (inverse @ (places[:, None] - places[:, :, None])[..., None])[..., 0]


def test_frames_are_right_handed_and_turn_with_their_points():
    points = np.random.default_rng(0).normal(size=(3, 50, 3))
    made = frames.frames_of(*points)
    np.testing.assert_allclose(made.swapaxes(-1, -2) @ made, np.broadcast_to(np.eye(3), (50, 3, 3)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(made), 1, atol=1e-12)
    seen = made.swapaxes(-1, -2) @ (points[1:] - points[:1])[..., None]  # (2, 50, 3, 1), in the frames
    np.testing.assert_allclose(seen[0, :, 1:], 0, atol=1e-12)
    np.testing.assert_allclose(seen[1, :, 2], 0, atol=1e-12)
    assert (seen[0, :, 0] > 0).all() and (seen[1, :, 1] > 0).all()
    turn = Rotation.from_rotvec([0.3, -1.2, 2.0]).as_matrix()
    np.testing.assert_allclose(frames.frames_of(*(points @ turn.T + 3)), turn @ made, atol=1e-12)


@pytest.fixture(params=["proteins", "every residue", "handedness"])
def task(request, tmp_path):
    """The columns of a task as a function of split, limit and angle."""
    if request.param == "proteins":
        write_chains(tmp_path / "chains")
        return lambda *given: proteins.protein_columns(str(tmp_path / "chains"), *given)
    if request.param == "every residue":
        return lambda *given: dense_columns(tmp_path / "chains", *given)
    write_centres(tmp_path / "centres.npz")
    return lambda *given: handedness.handedness_columns(str(tmp_path / "centres.npz"), *given)


def dense_columns(folder, *given):
    """Whole chains of the files are equally long."""
    write_chains(folder)
    columns = proteins.protein_columns(str(folder), *given, crop=8)
    return {name: np.stack(values) for name, values in columns.items()}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_turned_samples_are_the_same_seen_from_each_token(task, split):
    """All columns are the same poses, up to their rounding to float32, and no answer changes with the frame."""
    given, turned = (task(split, 16, angle) for angle in (0, 180))
    for columns in (given, turned):
        samples, tokens = columns["translations"].shape[:2]
        rotations = columns["matrices"].reshape(samples, tokens, 3, 3)
        np.testing.assert_allclose(np.linalg.det(rotations), 1, atol=1e-5)
        vectors = Rotation.from_rotvec(columns["positions"].reshape(-1, 3).astype(np.float64))
        np.testing.assert_allclose(vectors.as_matrix().reshape(rotations.shape), rotations, atol=1e-6)
        placed = columns["poses"].reshape(samples, tokens, 4, 4)
        np.testing.assert_array_equal(placed[..., :3, :3], rotations)
        np.testing.assert_array_equal(placed[..., :3, 3], columns["translations"])
        np.testing.assert_array_equal(placed[..., 3, :], np.broadcast_to([0, 0, 0, 1], placed.shape[:2] + (4,)))
    for name in ("features", "labels"):
        np.testing.assert_array_equal(given[name], turned[name])
    for one, other in zip(relative(given), relative(turned)):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.abs(given["matrices"] - turned["matrices"]).max() > 1


def test_samples_depend_on_their_split_and_number_alone(task):
    many, few = task("train", 30, 180), task("train", 5, 180)
    for name, values in few.items():
        np.testing.assert_array_equal(values, many[name][:5])
    assert not np.array_equal(few["positions"], task("validation", 5, 180)["positions"])


def test_neighbourhoods_of_residues_against_the_written_chains(tmp_path):
    written = write_chains(tmp_path)
    chains = proteins.read_chains(str(tmp_path))
    assert {chain.name: chain.labels for chain in chains} == {name: letters for name, (_, letters) in written.items()}
    assert [chain.name for chain in proteins.split_chains(chains, "validation")] == ["4"]
    assert [chain.name for chain in proteins.split_chains(chains, "train")] == ["0", "1", "2", "3"]
    backbone, letters = written["4"]
    columns = proteins.protein_columns(str(tmp_path), "validation", None, 0)
    assert columns["labels"].tolist() == [{"H": "helix", "E": "strand", "-": "other"}[letter] for letter in letters]
    for residue in range(RESIDUES):
        distances = np.linalg.norm(backbone[:, 1] - backbone[residue, 1], axis=1)
        nearest = sorted(range(RESIDUES), key=distances.__getitem__)[:12]
        np.testing.assert_allclose(columns["features"][residue, :, 1] * 10, distances[nearest], rtol=1e-5)
        np.testing.assert_array_equal(columns["features"][residue, :, 0], [1] + [0] * 11)
        for token, other in enumerate(nearest):
            nitrogen, alpha, carbon = backbone[other]
            matrix = columns["matrices"][residue, token].reshape(3, 3)
            np.testing.assert_allclose(
                columns["translations"][residue, token] * 10, alpha - backbone[residue, 1], atol=1e-5
            )
            # C lies on the x axis and N in the plane of x and y.
            np.testing.assert_allclose(
                matrix.T @ (carbon - alpha) / np.linalg.norm(carbon - alpha), [1, 0, 0], atol=1e-6
            )
            assert abs((matrix.T @ (nitrogen - alpha))[2]) < 1e-5 < (matrix.T @ (nitrogen - alpha))[1]


@pytest.mark.parametrize("split, chains, size", [("train", "0123", 8), ("validation", "4", RESIDUES)])
def test_samples_of_which_every_residue_is_asked(split, chains, size, tmp_path):
    """Around any residue of a chain in training, and whole chains in the evaluation, about their mean."""
    written, around = write_chains(tmp_path / "chains"), {}
    for name in chains:
        places, letters = written[name][0][:, 1], np.array([*written[name][1]])
        for residue in range(RESIDUES):
            nearest = np.linalg.norm(places - places[residue], axis=1).argsort(kind="stable")[:size]
            key = tuple(places[nearest[0]] - places[nearest].mean(axis=0))
            around[key] = places[nearest] - places[nearest].mean(axis=0), letters[nearest]
    columns = dense_columns(tmp_path / "chains", split, None if split != "train" else 60, 0)
    assert len(columns["labels"]) == (60 if split == "train" else 1) and (columns["features"] == 1).all()
    found = set()
    for translations, labels in zip(10 * columns["translations"], columns["labels"]):
        first = min(around, key=lambda key: np.linalg.norm(translations[0] - key))
        found.add(first)
        np.testing.assert_allclose(translations, around[first][0], atol=1e-5)
        assert labels.tolist() == [proteins.LABELS[letter] for letter in around[first][1]]
    assert len(found) > 30 or split != "train"


def chi(*places):
    """The dihedral angle of four places in degrees, by the projections of the outer bonds."""
    first, axis, last = np.diff(places, axis=0)
    axis /= np.linalg.norm(axis)
    first, last = (bond - bond @ axis * axis for bond in (-first, last))
    return np.degrees(np.arctan2(np.cross(first, last) @ axis, first @ last))


def test_rotamers_of_side_chains(tmp_path):
    """Of neighbourhoods and of whole chains, against the angles of the written atoms."""
    written, wanted = write_chains(tmp_path), {}
    for name, (backbone, _) in written.items():
        pairs = []
        for places, (kind, side) in zip(backbone, side_chains_of(int(name))):
            angle = None if len(side) < 2 or kind == "PRO" else chi(*places[:2], *side.values())
            near = angle is not None and min((60, 180, -60), key=lambda one: abs((angle - one + 180) % 360 - 180))
            pairs.append((str(kind), -100 if angle is None else {60: 0, 180: 1, -60: 2}[near]))
        wanted[name] = pairs
    asked = [pair for pair in wanted["4"] if pair[1] >= 0]
    columns = proteins.protein_columns(str(tmp_path), "validation", None, 180, None, "rotamer")
    kinds = [proteins.KINDS[number] for number in columns["features"][:, 0, 2:].argmax(axis=-1)]
    assert [*zip(kinds, columns["labels"].tolist())] == asked and 8 < len(asked) < RESIDUES
    # Neighbours say their distance alone.
    assert (columns["features"][:, 0, 2:].sum(axis=-1) == 1).all() and not columns["features"][:, 1:, 2:].any()
    whole = proteins.protein_columns(str(tmp_path), "validation", None, 180, 8, "rotamer")
    features, labels = whole["features"][0], whole["labels"][0]
    # From the first residue on, by distance.
    kinds = (proteins.KINDS[number] for number in features[:, 1:].argmax(axis=-1))
    assert sorted(zip(kinds, labels.tolist())) == sorted(wanted["4"])
    trained = [pair for name in "0123" for pair in wanted[name] if pair[1] >= 0]
    counts = {kind: [trained.count((kind, rotamer)) for rotamer in range(3)] for kind, _ in asked}
    right = [counts[kind].index(max(counts[kind])) == rotamer for kind, rotamer in asked]
    assert proteins.commonest_rotamer_accuracy(str(tmp_path)) == pytest.approx(np.mean(right))


def test_hands_of_centres_and_of_their_mirror_images(tmp_path):
    centres = write_centres(tmp_path / "centres.npz")
    for split in ("train", "validation"):
        columns = handedness.handedness_columns(str(tmp_path / "centres.npz"), split, None, 180)
        columns = {name: values[:400] for name, values in columns.items()}
        # What tells no hand is equal in mirror images.
        np.testing.assert_array_equal(columns["features"][::2], columns["features"][1::2])
        assert (columns["labels"][::2] != columns["labels"][1::2]).all()
        kinds = columns["features"][:, 1:, 1:5].argmax(axis=-1)  # (samples, 4), H, C, N, O
        places = np.take_along_axis(columns["translations"][:, 1:], kinds.argsort(axis=1)[:, ::-1, None], axis=1)
        np.testing.assert_array_equal(is_clockwise(places.astype(np.float64)), columns["labels"] == "R")
        rotations = columns["matrices"].reshape(-1, 5, 3, 3)
        lengths = np.linalg.norm(columns["translations"][:, 1:], axis=-1)
        np.testing.assert_allclose(columns["features"][:, 1:, -1], lengths, rtol=1e-5)
        np.testing.assert_allclose(
            rotations[:, 1:, :, 0] * lengths[..., None], -columns["translations"][:, 1:], atol=1e-5
        )
    train, evaluation = (handedness.select(centres, split) for split in ("train", "validation"))
    assert not set(train.scaffolds) & set(evaluation.scaffolds) and 0 in train.scaffolds
    assert len(train.is_r) + len(evaluation.is_r) == len(centres.is_r)
    # One of each scaffold, and its mirror image.
    assert len(columns["labels"]) == 2 * len(set(evaluation.scaffolds)) > 0


def test_frames_made_of_the_neighbours_of_a_centre(tmp_path):
    """They turn with the molecule: mirror images alone change the side of the third neighbour."""
    write_centres(tmp_path / "centres.npz")
    given, turned = (
        handedness.handedness_columns(str(tmp_path / "centres.npz"), "train", 400, angle) for angle in (0, 180)
    )
    for name in ("ordered_matrices", "ordered_translations"):
        np.testing.assert_allclose(turned[name], given[name], atol=1e-5)
    # Seen from each other, the atoms stay where they are.
    ordered = {name: given[f"ordered_{name}"] for name in ("matrices", "translations")}
    for one, other in zip(relative(ordered), relative(given)):
        np.testing.assert_allclose(one, other, atol=1e-5)
    kinds = given["features"][:, 1:, 1:5].argmax(axis=-1)  # (400, 4), H, C, N, O
    order = 1 + kinds.argsort(axis=1)[:, :0:-1, None]  # (400, 3, 1), O, N, C
    oxygen, nitrogen, carbon = np.take_along_axis(given["ordered_translations"], order, axis=1).swapaxes(0, 1)
    np.testing.assert_allclose(oxygen[:, 1:], 0, atol=1e-5)
    np.testing.assert_allclose(nitrogen[:, 2], 0, atol=1e-5)
    assert (oxygen[:, 0] > 0).all() and (nitrogen[:, 1] > 0).all()
    sides = np.linalg.det(np.take_along_axis(turned["translations"].astype(np.float64), order, axis=1))
    np.testing.assert_array_equal(np.sign(carbon[:, 2]), np.sign(sides))
    mirrored = given["ordered_translations"][::2] * np.array([1, 1, -1])
    np.testing.assert_allclose(given["ordered_translations"][1::2], mirrored, atol=1e-5)


def test_equal_atoms_are_ordered_by_those_around_them_and_by_their_distances():
    numbers = np.array([[6, 6, 6, 35], [6, 6, 6, 1]], np.uint8)
    spheres = np.zeros((2, 4, 8), np.uint8)
    spheres[0, 1] = 32  # one more than the largest uint8 together, around the nearest
    places = np.random.default_rng(0).normal(size=(2, 5, 3))
    around = places[:, 1:] - places[:, :1]
    places[:, 1:] = places[:, :1] + around / np.linalg.norm(around, axis=-1, keepdims=True) * [[2], [1], [3], [4]]
    columns = {"matrices": np.tile(np.eye(3).ravel(), (2, 5, 1)), "translations": places}
    ordered = handedness.ordered_columns(numbers, spheres, columns)["ordered_translations"]
    np.testing.assert_allclose(ordered[:, 0], 0, atol=1e-6)
    for seen, first, second in zip(ordered, (4, 3), (2, 1)):
        np.testing.assert_allclose([*seen[first, 1:], seen[second, 2]], 0, atol=1e-6)
        assert seen[first, 0] > 0 and seen[second, 1] > 0


def test_atoms_on_a_line_with_the_centre_do_not_lie_beside(tmp_path):
    """As in nitriles: the frames stay orthonormal."""
    centres = write_centres(tmp_path / "centres.npz")
    centres.further[:] = 2 * centres.places[:, :, None]
    np.savez(tmp_path / "line.npz", **vars(centres))
    columns = handedness.handedness_columns(str(tmp_path / "line.npz"), "train", 100, 180)
    rotations = columns["matrices"].reshape(-1, 3, 3)
    np.testing.assert_allclose(
        rotations @ rotations.swapaxes(-1, -2), np.broadcast_to(np.eye(3), rotations.shape), atol=1e-5
    )


@pytest.mark.parametrize(
    "name", ["proteins", *(pytest.param(name, marks=pytest.mark.slow) for name in ("every residue", "handedness"))]
)
def test_answers_depend_on_frames_only_with_commuting_rotations(name, tmp_path):
    """A run of the recipe, evaluated in random frames and in those of the file."""
    write_chains(tmp_path / "proteins")
    write_centres(tmp_path / "handedness.npz")
    near = ["--position_columns", "translations", "--position_scale", "2.63", "--distance_axes", "[0, 1, 2]"]
    crop = name == "every residue"
    name = "proteins" if crop else name
    structures = {"proteins": tmp_path / "proteins", "handedness": tmp_path / "handedness.npz"}[name]
    recipe = str(ROOT / "training" / "evidence" / "recipes" / f"{name}_mini.yaml")
    given, changes = [recipe, "--structures", str(structures), *SMALL], {}
    given += ["--crop", "8"] if crop else []
    poses = ["--position_encoding", "none", "--rotate_values", "false", "--pose_columns", "poses", *(near * crop)]
    mixed = ["--position_encoding", "rope_mixed"]
    for model, flags in {"so3": [], "poses": poses, "rope_mixed": mixed}.items():
        if flags:
            flags = [*flags, "--block_size", "None", "--rotary_init", "None"]
        folder = tmp_path / model
        trained = token_classification.main([*given, *flags, "--output_dir", str(folder)])
        frames_of_file = ["--evaluation_angle", "0", "--do_train", "false", "--model_name_or_path", str(folder)]
        again = token_classification.main([*given, *flags, *frames_of_file, "--output_dir", str(folder / "again")])
        assert trained["eval_samples"] == again["eval_samples"]
        changes[model] = abs(again["eval_loss"] - trained["eval_loss"])
    # Rotation vectors and poses are rounded to float32.
    assert max(changes["so3"], changes["poses"]) < 1e-5 and changes["rope_mixed"] > 1e-4
    recorded = json.loads((folder / "run_config.json").read_text())["examples"]["train"]
    assert (recorded["name"], recorded["folder"]) == (name, structures.name)


def break_chains(folder, name, content):
    write_chains(folder)
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("2.dssp", b"HHX", r"2.dssp contains X; accepted: H, E, -"),
        ("2.dssp", b"HHH", "2.gz has 20 residues and 2.dssp 3 labels; accepted: as many of both, and more than 11"),
        ("2.dssp", b"", "20 residues and 2.dssp 0 labels"),
        ("2.gz", b"no archive", "2.gz cannot be read"),
        ("2.gz", gzip.compress(b"ATOM", mtime=0)[:-9], "2.gz cannot be read"),
        (
            "2.gz",
            gzip.compress(atom(1, "CA", 1, (0, 0, 0)).replace("0.000", "a.bcd", 1).encode(), mtime=0),
            "could not convert",
        ),
        (
            "2.gz",
            gzip.compress(atom(1, "CA", 7, (0, 0, 0)).encode(), mtime=0),
            "residue A   7 lacks one of the atoms N, CA, C",
        ),
        (
            "2.gz",
            gzip.compress(
                "\n".join(atom(1, name, 7, (0, 0, 0), amino="UNK") for name in ("N", "CA", "C")).encode(), mtime=0
            ),
            "2.gz contains residues UNK; accepted: ALA, ARG",
        ),
    ],
)
def test_chains_that_cannot_be_read(name, content, message, tmp_path):
    break_chains(tmp_path, name, content)
    with pytest.raises(InputError, match=message):
        proteins.read_chains(str(tmp_path))


def test_structures_that_are_missing(tmp_path):
    def load(name, **arguments):
        kind = with_task(TokenDataArguments, name)
        return load_tokens(kind(dataset_name=name, **arguments), ("training",), 0)

    with pytest.raises(InputError, match="--dataset_name proteins reads --structures, which is missing"):
        load("proteins")
    write_chains(tmp_path / "chains")
    for crop, accepted in ((21, "up to 20"), (0, "1 or more")):
        with pytest.raises(InputError, match=f"--crop {crop}; accepted: {accepted}"):
            load("proteins", structures=str(tmp_path / "chains"), crop=crop)
    with pytest.raises(InputError, match="--ask 'kind'; accepted: structure, rotamer"):
        load("proteins", structures=str(tmp_path / "chains"), ask="kind")
    with pytest.raises(InputError, match="contains 0 files NAME.dssp; accepted: a folder with at least 5"):
        load("proteins", structures=str(tmp_path))
    with pytest.raises(InputError, match="is not a file; accepted: one of evidence/carbon_centres.py"):
        load("handedness", structures=str(tmp_path))
    np.savez(tmp_path / "other.npz", numbers=np.zeros(3))
    (tmp_path / "none.npz").write_text("no archive")
    for name in ("other.npz", "none.npz"):
        with pytest.raises(InputError, match="cannot be read: .*; accepted: a file of evidence/carbon_centres.py"):
            load("handedness", structures=str(tmp_path / name))
