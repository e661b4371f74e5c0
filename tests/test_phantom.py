"Phantoms: reproducible, independent, in FLARE 2022's layout, and a task worth learning"
import gzip
import json

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from freerep.core import InputError
from freerep.examples import FLARE22_CLASSES, open_examples, open_query
from freerep.phantom import PHANTOM_ORGANS, Part, body_axes, make_phantom, part_box, part_level, phantom_name, write_phantoms


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_phantoms(tmp_path_factory.mktemp("phantoms")/"made", 3, slices=16, size=64, seed=4)


def test_organs_have_flares_numbers():
    assert len(PHANTOM_ORGANS) >= 6
    assert all(FLARE22_CLASSES[i] == name for i, name in PHANTOM_ORGANS.items())


wave = st.tuples(st.floats(-.2, .2), *[st.floats(-4, 4)]*3, st.floats(0, 6.3))
part = st.builds(lambda c, r, a, w: Part("any", 0., c, r, a, tuple(w)), st.tuples(*[st.floats(-.8, .8)]*3), st.tuples(*[st.floats(.05, 1.)]*3),
                 st.floats(-3.2, 3.2), st.lists(wave, max_size=4))


@settings(max_examples=60, deadline=None)
@given(part)
def test_level_is_the_formula_and_stays_in_its_box(p):
    axes = body_axes(7, 32)
    z, y, x = np.meshgrid(*axes, indexing="ij")
    d = np.stack([x, y, z], -1) - p.centre
    turn = np.array([[np.cos(p.angle), np.sin(p.angle), 0], [-np.sin(p.angle), np.cos(p.angle), 0], [0, 0, 1]])
    q = d @ turn.T/p.radii
    ref = 1 + sum(a*np.sin(q @ np.array(w) + phase) for a, *w, phase in p.waves) - np.linalg.norm(q, axis=-1)
    level = part_level(p, axes)
    np.testing.assert_allclose(level, ref, atol=2e-3, rtol=1e-4)
    box = part_box(p, axes)
    np.testing.assert_array_equal(part_level(p, [a[s] for a, s in zip(axes, box)]) > 0, level[box] > 0)
    level[box] = -1
    assert not (level > 0).any()


def test_depends_on_seed_and_number_only(tmp_path):
    for seed, number in ((0, 0), (0, 1), (3, 7)):
        a, b = (make_phantom(seed, number, slices=8, size=48) for _ in range(2))
        np.testing.assert_array_equal(a[0], b[0]), np.testing.assert_array_equal(a[1], b[1])
    assert len({make_phantom(s, n, slices=8, size=48)[0].tobytes() for s in range(3) for n in range(3)}) == 9
    few, many = (write_phantoms(tmp_path/str(n), n, slices=8, size=48, seed=1) for n in (1, 2))
    for file in ("images/FLARE22_phantom_0000_0000.nii.gz", "labels/FLARE22_phantom_0000.nii.gz"):
        assert (few/file).read_bytes() == (many/file).read_bytes()


def test_global_random_state_is_left_alone():
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    make_phantom(0, 0, slices=4, size=32)
    np.testing.assert_array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("seed", range(8))
def test_anatomy(seed):
    hu, labels = make_phantom(seed, seed, slices=24, size=64)
    assert set(np.unique(labels)) == {0, *PHANTOM_ORGANS}
    place = {name: np.argwhere(labels == i).mean(0) for i, name in PHANTOM_ORGANS.items()}
    assert place["liver"][2] < place["aorta"][2] < place["spleen"][2]            # the patient's right is on the left of the picture
    assert place["right kidney"][2] < place["aorta"][2] < place["left kidney"][2]
    assert place["right kidney"][0] < place["liver"][0] and place["left kidney"][0] < place["spleen"][0]   # slices go from feet to head
    assert place["gallbladder"][1] < place["right kidney"][1]                    # front before back
    mean = {name: hu[labels == i].mean() for i, name in PHANTOM_ORGANS.items()}
    assert mean["gallbladder"] < mean["liver"] < mean["left kidney"]
    assert (hu[labels > 0] > -300).all() and (hu[:, 0, 0] < -900).all()           # organs inside the body, air outside
    for i, name in PHANTOM_ORGANS.items():
        shown = (labels == i).any((1, 2))
        assert shown.sum() >= 2
        if name != "aorta": assert not shown.all()


def test_patients_differ():
    stacks = [make_phantom(0, n, slices=24, size=64) for n in range(12)]
    share = np.array([[np.count_nonzero(l == i) for i in PHANTOM_ORGANS] for _, l in stacks])
    assert (share.std(0)/share.mean(0) > .08).all()
    noise = [abs(np.diff(h[l == 1].astype(float))).clip(0, 60).mean() for h, l in stacks]
    bright = [np.median(h[l == 2]) for h, l in stacks]
    assert max(noise) > 1.3*min(noise) and max(bright) > min(bright) + 20


def test_examples_know_it(folder):
    examples = open_examples(folder)
    assert examples.kind == "slices" and not examples.problems
    assert examples.classes == {i: FLARE22_CLASSES[i] for i in PHANTOM_ORGANS}
    assert list(examples.volumes) == [phantom_name(n) for n in range(3)]
    hu, labels = make_phantom(4, 1, slices=16, size=64)
    shown = np.flatnonzero(labels.any((1, 2)))
    at = examples.volumes[phantom_name(1)]
    assert len(at) == len(shown)
    for i, k in list(zip(at, shown))[::3]:
        np.testing.assert_array_equal(examples[i].labels, labels[k])
        grey = ((hu[k].astype(float) + 160)*255/400).clip(0, 255)
        assert abs(examples[i].image[..., 0] - grey).max() <= .5 + 1e-3
    query = open_query(folder/"images"/"FLARE22_phantom_0002_0000.nii.gz")
    assert query.kind == "volume" and len(query) == 16


def test_names_travel_without_the_class_file(folder, tmp_path):
    for kind in ("images", "labels"):
        (tmp_path/kind).mkdir()
        for p in (folder/kind).iterdir(): (tmp_path/kind/p.name).write_bytes(p.read_bytes())
    assert open_examples(tmp_path).classes[13] == "left kidney"


def test_files(folder):
    facts = json.loads((folder/"phantom.json").read_text())
    assert (facts["volumes"], facts["slices"], facts["size"], facts["seed"]) == (3, 16, 64, 4)
    for p in sorted((folder/"images").iterdir()):
        assert gzip.decompress(p.read_bytes())[344:347] == b"n+1"
        im = nib.load(p)
        assert im.get_data_dtype() == np.int16 and nib.aff2axcodes(im.affine) == ("L", "P", "S")
        np.testing.assert_allclose(im.header.get_zooms(), (360/64, 360/64, 15))


@pytest.mark.parametrize("wrong, words", [(dict(volumes=0), "volumes=0"), (dict(slices=3), "slices=3"), (dict(size=31), "size=31"), (dict(size=5000), "size=5000"), (dict(seed=-1), "seed -1")])
def test_bad_arguments_leave_nothing(tmp_path, wrong, words):
    with pytest.raises(InputError, match=words): write_phantoms(tmp_path/"out", **{"volumes": 1, "slices": 4, "size": 32, **wrong})
    assert list(tmp_path.iterdir()) == []


def test_force(tmp_path):
    out = write_phantoms(tmp_path/"out", 2, slices=4, size=32)
    with pytest.raises(InputError, match="exists already"): write_phantoms(out, 1, slices=4, size=32)
    assert len(list((out/"images").iterdir())) == 2
    write_phantoms(out, 1, slices=4, size=32, force=True)
    assert len(list((out/"images").iterdir())) == 1
