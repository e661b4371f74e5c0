"""Examples, queries and masks put back: odd files, all orientations, real scans."""
import ast
import importlib
import itertools
import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
from hypothesis import given, settings, strategies as st
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, ornt_transform
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from helpers import scene, write_video
from freerep.core import InputError
from freerep.examples import (FLARE22_CLASSES, MaskReader, apply_window, are_examples, are_scans, array_examples, ArrayQuery, check_window, choose_window, class_colour, decode_rle, examples_info,
                              examples_text, from_slices, grey_sort, open_examples, open_queries, open_query, open_volume, overlay, paint, polygon_mask, read_binary, read_classes, scans_info, scans_text,
                              save_mask, to_slices, volume_name, volume_problems, write_mask_like, write_masks, _same_place)

CODES = ["".join(p) for axes in itertools.permutations(("RL", "AP", "SI")) for p in itertools.product(*axes)]
SPACING = (2., 3., 5.)


def stored(volume, code, spacing=SPACING, origin=(-30., -40., 7.)):
    "An RAS volume stored in another orientation, and its affine"
    affine = np.diag([*spacing, 1.])
    affine[:3, 3] = origin
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(code))
    return apply_orientation(volume, turn), affine @ inv_ornt_aff(turn, volume.shape)


def scan(shape=(12, 10, 6), seed=0):
    "CT-like numbers and labels, RAS"
    r = np.random.default_rng(seed)
    hu = r.integers(-1000, 900, shape).astype(np.int16)
    labels = r.integers(0, 4, shape).astype(np.uint8)
    labels[:, :, 0] = 0
    return hu, labels


def save(path, array, affine, dtype=None, slope=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    im = nib.Nifti1Image(array, affine)
    if dtype: im.set_data_dtype(dtype)
    if slope: im.header.set_slope_inter(*slope)
    nib.save(im, path)
    return path


def scan_folder(root, codes=("RAS",), images="images", labels="labels", end=""):
    for k, code in enumerate(codes):
        hu, lab = scan(seed=k)
        save(root/images/f"case{k}{end}.nii.gz", *stored(hu, code))
        save(root/labels/f"case{k}.nii.gz", *stored(lab.astype(np.float64), code))
    return root


def dicom(folder, slices, spacing=(2., 3., 5.), orientation=(1, 0, 0, 0, 1, 0), uid="1.2.3", positions=None, names=None, **tags):
    "Slices (s, h, w) in HU as DICOM files"
    folder.mkdir(parents=True, exist_ok=True)
    normal = np.cross(orientation[:3], orientation[3:])
    for k, s in enumerate(slices):
        meta, ds = FileMetaDataset(), Dataset()
        meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID, meta.MediaStorageSOPInstanceUID = CTImageStorage, ExplicitVRLittleEndian, generate_uid()
        ds.file_meta, ds.SOPClassUID, ds.SOPInstanceUID, ds.SeriesInstanceUID, ds.Modality = meta, CTImageStorage, meta.MediaStorageSOPInstanceUID, uid, "CT"
        ds.Rows, ds.Columns = s.shape
        ds.PixelSpacing, ds.ImageOrientationPatient = [spacing[1], spacing[0]], list(map(float, orientation))
        ds.ImagePositionPatient = [float(v) for v in (np.array([-10., -20., 30.]) + k*spacing[2]*normal if positions is None else positions[k])]
        ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PixelRepresentation = 1, "MONOCHROME2", 0
        ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.RescaleSlope, ds.RescaleIntercept = 16, 12, 11, 1, -1024
        for tag, v in tags.items(): setattr(ds, tag, v)
        ds.PixelData = (s.astype(int) + 1024).astype("<u2").tobytes()
        ds.save_as(folder/(names[k] if names else f"{uid}.{97*k % 101:03d}"), enforce_file_format=True)
    return folder


def png(path, array, palette=None, **kw):
    path.parent.mkdir(parents=True, exist_ok=True)
    im = Image.fromarray(np.asarray(array))
    if palette: im.putpalette(palette)
    im.save(path, **kw)
    return path


def shapes(size=(60, 80)):
    y, x = np.mgrid[:size[0], :size[1]]
    disc, square = (x - 25)**2 + (y - 30)**2 < 15**2, (abs(x - 58) < 11) & (abs(y - 28) < 14)
    return disc, np.where(disc, 1, np.where(square, 2, 0)).astype(np.uint8)


# ---- window ----

@given(st.floats(-2000, 2000), st.floats(1e-2, 4000), st.lists(st.integers(-32768, 32767), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_window_is_the_formula(level, width, values):
    got = apply_window(np.array(values, np.int16), (level, width))
    want = np.array([255*min(max((v - (level - width/2))/width, 0), 1) for v in values])
    assert got.dtype == np.uint8 and np.abs(got - want).max() <= .51
    assert (np.diff(got[np.argsort(values)].astype(int)) >= 0).all()


def test_window_of_odd_values():
    assert apply_window(np.array([np.nan, np.inf, -np.inf, 40], np.float64), (40, 400)).tolist() == [0, 255, 0, 128]
    for bad in ((40,), "brain", (40, 0), (40, -3), (np.nan, 4), 7):
        with pytest.raises(InputError, match="window"): check_window(bad)
    assert check_window("auto") is None and check_window([40, "400"]) == (40, 400)


def test_window_is_chosen_by_values():
    r = np.random.default_rng(0)
    air = np.r_[np.full(5000, -1024), r.normal(40, 50, 5000)]
    assert choose_window(air.astype(np.int16)) == (40, 400)
    assert choose_window((air + 1024).astype(np.int16), "CT") == (40, 400)
    level, width = choose_window(np.r_[np.zeros(5000), r.uniform(100, 900, 5000), [-40, -30]].astype(np.float32), None)
    assert 95 < level - width/2 < 110 and 890 < level + width/2 < 905
    assert choose_window(np.arange(256, dtype=np.uint8)) == (127.5, 255)
    level, width = choose_window(np.full(10, 3, np.int16))
    assert width > 0 and np.isfinite(level)
    assert np.isfinite(choose_window(np.full(10, np.nan))).all()


# ---- orientation ----

@pytest.mark.parametrize("code", CODES)
def test_every_orientation_gives_the_same_slices_and_goes_back(code):
    hu, labels = scan()
    v, affine = stored(hu, code)
    slices = to_slices(v, affine)
    assert slices.shape == (6, 10, 12)
    for k, y, x in ((0, 0, 0), (5, 9, 11), (2, 3, 4)): assert slices[k, y, x] == hu[11 - x, 9 - y, k]     # row 0 is the front, column 0 the patient's right
    assert (from_slices(slices, affine) == v).all()


@pytest.mark.parametrize("code", CODES[::5])
def test_write_back_is_exact(tmp_path, code):
    hu, labels = scan()
    query = open_query(save(tmp_path/"q.nii.gz", *stored(hu, code)))
    truth, affine = stored(labels, code)
    assert query.volume.orientation == code and query.volume.spacing == SPACING and query.volume.size == (12, 10)
    path, = write_masks(query, tmp_path/"out", reversed(list(enumerate(to_slices(truth, affine)))), classes={1: "a"})
    got, was = nib.load(path), nib.load(tmp_path/"q.nii.gz")
    assert path.name == "q_seg.nii.gz" and got.get_data_dtype() == np.uint8
    assert (got.affine == was.affine).all() and got.shape == was.shape
    assert (np.asanyarray(got.dataobj) == truth).all()
    for key in ("sform_code", "qform_code", "pixdim", "xyzt_units", "srow_x", "quatern_b"): assert (got.header[key] == was.header[key]).all()
    assert (open_volume(path).labels() == to_slices(truth, affine)).all()


@pytest.mark.parametrize("shape,kind", [((12, 10), nib.Nifti1Image), ((12, 10, 1), nib.Nifti1Image), ((12, 10, 6, 1), nib.Nifti1Image), ((12, 10, 6), nib.Nifti2Image)])
def test_write_back_keeps_odd_shapes(tmp_path, shape, kind):
    values = np.random.default_rng(0).integers(0, 200, shape).astype(np.int16)
    nib.save(kind(values, np.diag([2., 3, 5, 1])), tmp_path/"q.nii")
    query = open_query(tmp_path/"q.nii")
    masks = query.volume.labels()
    out = write_mask_like(query, masks)
    assert out.shape == shape and type(out) is kind and (np.asanyarray(out.dataobj) == values).all()


def test_write_back_of_a_rotated_volume_and_of_large_labels(tmp_path):
    a = np.radians(20)
    affine = np.array([[1, 0, 0, 4], [0, np.cos(a), -np.sin(a), 5], [0, np.sin(a), np.cos(a), 6], [0, 0, 0, 1]]) @ np.diag([-2., 3, 5, 1])
    hu, labels = scan()
    query = open_query(save(tmp_path/"q.nii.gz", hu, affine))
    masks = to_slices(labels.astype(int)*1000, affine)
    path, = write_masks(query, tmp_path, enumerate(masks))
    assert (np.asanyarray(nib.load(path).dataobj) == labels.astype(int)*1000).all() and nib.load(path).get_data_dtype() == np.uint16
    assert (nib.load(path).affine == nib.load(tmp_path/"q.nii.gz").affine).all()


def test_written_file_is_reproducible_and_whole_or_absent(tmp_path):
    hu, labels = scan()
    query = open_query(save(tmp_path/"q.nii.gz", *stored(hu, "LPS")))
    a, b = (write_masks(query, tmp_path/n, enumerate(np.ones((6, 10, 12), int)))[0].read_bytes() for n in "ab")
    assert a == b
    with pytest.raises(RuntimeError):
        with query.writer(tmp_path/"c") as w:
            w.write(0, np.ones((10, 12), int))
            raise RuntimeError("stopped")
    assert not (tmp_path/"c").exists()
    for bad, why in ((np.ones((12, 10), int), "shape"), (np.full((10, 12), .5), "whole"), (np.full((10, 12), -1), "between")):
        with pytest.raises(InputError, match=why):
            with query.writer(tmp_path/"c") as w: w.write(0, bad)
    with pytest.raises(InputError, match="shape"): write_mask_like(query, np.zeros((6, 12, 10), int))


def test_scaled_volumes(tmp_path):
    "scl_slope and scl_inter count, for images and for labels"
    hu, labels = scan()
    path = save(tmp_path/"i.nii.gz", hu.astype(np.float32), np.diag([2., 3, 5, 1]), np.int16)
    im = nib.load(path)
    assert im.dataobj.slope != 1
    assert np.abs(open_volume(path, (0, 2000)).read().astype(int) - apply_window(to_slices(hu, im.affine), (0, 2000))).max() <= 1
    header = nib.Nifti1Header()
    header.set_data_dtype(np.int16), header.set_data_shape(labels.shape), header.set_slope_inter(.5, 0)
    raw = nib.Nifti1Image((labels*2).astype(np.int16), np.eye(4))
    raw.header.set_slope_inter(1, 0)
    nib.save(raw, tmp_path/"l.nii")
    data = bytearray((tmp_path/"l.nii").read_bytes())
    data[112:116] = np.float32(.5).tobytes()                     # scl_slope of the header
    (tmp_path/"l.nii").write_bytes(data)
    assert (open_volume(tmp_path/"l.nii").labels() == to_slices(labels, np.eye(4))).all()


# ---- volumes that are refused ----

def test_volumes_refused_with_the_reason(tmp_path):
    eye = np.diag([2., 3., 5., 1.])
    cases = {"4 dimensions": np.zeros((4, 4, 3, 2), np.int16), "colours": np.zeros((4, 4, 3), [("R", "u1"), ("G", "u1"), ("B", "u1")]), "complex": np.zeros((4, 4, 3), np.complex64)}
    for why, bad in cases.items():
        with pytest.raises(InputError, match=why): open_query(save(tmp_path/"v.nii.gz", bad, eye))
    shear = eye.copy()
    shear[1, 2] = 2
    with pytest.raises(InputError, match="right angles.*tilted gantry"): open_query(save(tmp_path/"v.nii.gz", np.zeros((4, 4, 3), np.int16), shear))
    with pytest.raises(InputError, match="does not exist"): open_query(tmp_path/"none.nii.gz")
    (tmp_path/"text.nii.gz").write_text("no volume")
    with pytest.raises(InputError, match="text.nii.gz"): open_query(tmp_path/"text.nii.gz")
    whole = save(tmp_path/"w.nii.gz", np.random.default_rng(0).integers(0, 999, (40, 40, 9)).astype(np.int16), eye).read_bytes()
    (tmp_path/"cut.nii.gz").write_bytes(whole[:len(whole)//2])
    with pytest.raises(InputError, match="cut short"): list(open_query(tmp_path/"cut.nii.gz").frames)


def test_labels_refused_with_the_reason(tmp_path):
    for bad, why in ((np.full((4, 4, 3), 1.5), "whole number, found 1.5"), (np.full((4, 4, 3), -1, np.int16), "between 0 and 65535"), (np.full((4, 4, 3), np.nan), "whole number"),
                     (np.full((4, 4, 3), 70000, np.int32), "70000")):
        with pytest.raises(InputError, match=why): open_volume(save(tmp_path/"l.nii.gz", bad, np.eye(4))).labels()


@pytest.mark.parametrize("how,why", [("shape", "voxels against"), ("affine", "mm apart"), ("float", "whole number"), ("cut", "cut short")])
def test_a_bad_pair_is_left_out_by_name_and_alone_is_an_error(tmp_path, how, why):
    root = scan_folder(tmp_path/"d", ("RAS", "LPS"))
    lab, affine = stored(scan(seed=1)[1], "LPS")
    bad = root/"labels/case1.nii.gz"
    if how == "shape": save(bad, lab[:-1], affine)
    if how == "affine": save(bad, lab, affine + np.array([[0, 0, 0, 2.]] + [[0]*4]*3))
    if how == "float": save(bad, lab*.5, affine)
    if how == "cut": bad.write_bytes(bad.read_bytes()[:200])
    examples = open_examples(root)
    assert list(examples.volumes) == ["case0"]
    problem, = examples.problems
    assert "case1" in problem["file"] and why in problem["problem"] and problem["problem"].endswith("left out")
    (root/"images/case0.nii.gz").unlink(), (root/"labels/case0.nii.gz").unlink()
    with pytest.raises(InputError, match="no example can be used.*case1"): open_examples(root)


def test_labels_may_be_stored_in_another_order_than_their_image(tmp_path):
    hu, labels = scan()
    save(tmp_path/"images/a.nii.gz", *stored(hu, "LAS")), save(tmp_path/"labels/a.nii.gz", *stored(labels, "PSR"))
    examples = open_examples(tmp_path, all_slices=True)
    assert (np.stack([examples.labels(i) for i in range(6)]) == to_slices(labels, np.eye(4))).all()


# ---- folders of scans ----

@pytest.mark.parametrize("end,images,labels", [("", "images", "labels"), ("_0000", "images", "labels"), ("_0000", "imagesTr", "labelsTr")])
def test_scan_folders(tmp_path, end, images, labels):
    root = scan_folder(tmp_path/"data", ("LPS", "PSR"), images, labels, end)
    examples = open_examples(root)
    assert list(examples.volumes) == ["case0", "case1"] and len(examples) == 10
    assert examples.classes == {1: "class 1", 2: "class 2", 3: "class 3"} and len(set(examples.colours.values())) == 3
    for k in range(2):
        hu, lab = scan(seed=k)
        at = examples.volumes[f"case{k}"]
        assert at == sorted(at)
        grey = apply_window(to_slices(hu, np.eye(4)), (40, 400))
        for j, i in enumerate(at, start=0):
            e = examples[i]
            assert e.name == f"case{k}/{j + 1:03d}" and e.image.dtype == np.uint8 and e.labels.dtype == np.int32 and e.known == {1, 2, 3}
            assert (e.image == grey[j + 1][..., None]).all() and (e.labels == to_slices(lab, np.eye(4))[j + 1]).all()
    assert len(open_examples(root, all_slices=True)) == 12
    sub = examples.subset(examples.volumes["case1"])
    assert list(sub.volumes) == ["case1"] and sub.volumes["case1"] == list(range(5)) and (sub[2].labels == examples[7].labels).all()
    assert not np.array_equal(open_examples(root, (0, 100))[0].image, examples[0].image)
    assert are_examples(root)


def test_flare_names_only_where_the_layout_says_so(tmp_path):
    for name, flare in (("FLARE22_Tr", True), ("case", False)):
        root = tmp_path/f"data_{name[:2]}"
        hu, lab = scan()
        save(root/f"images/{name}_0001_0000.nii.gz", *stored(hu, "RAS")), save(root/f"labels/{name}_0001.nii.gz", *stored(lab, "RAS"))
        classes = open_examples(root).classes
        assert classes == (FLARE22_CLASSES if flare else {i: f"class {i}" for i in (1, 2, 3)})
    assert FLARE22_CLASSES[13] == "left kidney" and FLARE22_CLASSES[2] == "right kidney" and len(FLARE22_CLASSES) == 13
    save(tmp_path/"data_FL/labels/FLARE22_Tr_0001.nii.gz", *stored(lab*10, "RAS"))          # 30 is no FLARE22 label
    assert set(open_examples(tmp_path/"data_FL").classes.values()) == {"class 10", "class 20", "class 30"}


def test_names_from_files(tmp_path):
    root = scan_folder(tmp_path/"data")
    (root/"labels.txt").write_text("1 liver 10 20 30\n2 spleen 1 2 3\n")
    examples = open_examples(root)
    assert examples.classes == {1: "liver", 2: "spleen", 3: "class 3"} and examples.colours[1] == (10, 20, 30)
    assert any("no name for class 3" in p["problem"] for p in examples.problems)


def test_a_volume_is_read_once_and_memory_is_bounded(tmp_path):
    root = scan_folder(tmp_path/"data", ("RAS", "LPS", "PSR"))
    examples = open_examples(root)
    reads = []
    for v in {id(i.volume): i.volume for i in examples.items}.values():
        v.load = lambda load=v.load, n=v.name: (reads.append(n), load())[1]
    for i in range(len(examples)): examples[i]
    assert reads == ["case0", "case1", "case2"]
    cache = examples.items[0].cache
    cache.limit = 1                                        # no room: one scan and its labels stay
    examples[0], examples[1]
    assert len(cache.kept) == 2
    del reads[:]
    for i in examples.volumes["case1"]: examples[i]
    assert reads == ["case1"] and len(cache.kept) == 2


def test_volume_names(tmp_path):
    for n in ("a_0000.nii.gz", "s_0000.nii.gz", "s_0001.nii.gz", "b.nii", "_0000.nii.gz"): (tmp_path/n).touch()
    assert [volume_name(tmp_path/n) for n in ("a_0000.nii.gz", "s_0000.nii.gz", "s_0001.nii.gz", "b.nii", "_0000.nii.gz")] == ["a", "s_0000", "s_0001", "b", "_0000"]


# ---- DICOM ----

def ct(n=6, size=(10, 12), seed=0): return np.random.default_rng(seed).integers(-1000, 900, (n, *size)).astype(np.int16)


def test_dicom_series_in_the_order_of_positions(tmp_path):
    slices = ct()
    query = open_query(dicom(tmp_path/"s", slices))
    assert query.kind == "volume" and query.volume.modality == "CT" and query.volume.spacing == (2, 3, 5) and query.volume.orientation == "LPS"
    assert (np.stack(list(query.frames))[..., 0] == apply_window(slices, (40, 400))).all()
    assert np.allclose(query.volume.affine[:3, 3], [10, 20, 30])
    backwards = open_query(dicom(tmp_path/"b", slices, positions=[(-10, -20, 30 - 5*k) for k in range(6)]))
    assert (np.stack(list(backwards.frames)) == np.stack(list(query.frames))[::-1]).all()


@pytest.mark.parametrize("orientation,turn", [((1, 0, 0, 0, 0, -1), "coronal"), ((0, 1, 0, 0, 0, -1), "sagittal")])
def test_dicom_of_another_plane_becomes_axial(tmp_path, orientation, turn):
    "Each voxel lands where its DICOM position says"
    slices = ct()
    query = open_query(dicom(tmp_path/"s", slices, orientation=orientation))
    row, column, normal = np.array(orientation[:3]), np.array(orientation[3:]), np.cross(orientation[:3], orientation[3:])
    grey, place = apply_window(slices, (40, 400)), query.volume.place
    for k, y, x in ((0, 0, 0), (5, 9, 11), (2, 3, 7), (4, 8, 1)):
        lps = np.array([-10., -20., 30.]) + x*2*row + y*3*column + k*5*normal
        w, h, s = np.rint(np.linalg.solve(place, [-lps[0], -lps[1], lps[2], 1])[:3]).astype(int)
        assert query[s][h, w, 0] == grey[k, y, x]


def test_dicom_masks_lie_on_the_series(tmp_path):
    query = open_query(dicom(tmp_path/"s", ct()))
    masks = np.random.default_rng(1).integers(0, 3, (6, 10, 12))
    path, = write_masks(query, tmp_path/"out", enumerate(masks))
    back = open_volume(path)
    assert path.name == "s_seg.nii.gz" and _same_place(query.volume, back) is None and (back.labels() == masks).all()


def test_dicom_refused_with_the_reason(tmp_path):
    s = ct()
    z = lambda ks: [(-10, -20, 30 + 5*k) for k in ks]
    with pytest.raises(InputError, match="tilted gantry"): open_query(dicom(tmp_path/"a", s, positions=[(-10, -20 + k, 30 + 5*k) for k in range(6)]))
    with pytest.raises(InputError, match="not equally spaced.*missing"): open_query(dicom(tmp_path/"b", s, positions=z((0, 1, 2, 4, 5, 6))))
    with pytest.raises(InputError, match="more than once"): open_query(dicom(tmp_path/"c", s, positions=z((0, 1, 2, 0, 1, 2))))
    with pytest.raises(InputError, match="enhanced"): open_query(dicom(tmp_path/"d", s[:1], NumberOfFrames=3))
    dicom(tmp_path/"e", s, SeriesDescription="venous"), dicom(tmp_path/"e", s[:4], uid="1.2.4", SeriesDescription="arterial")
    with pytest.raises(InputError, match="mixes 2 series.*venous.*arterial"): open_query(tmp_path/"e")
    for p in dicom(tmp_path/"f", s).iterdir():
        ds = pydicom.dcmread(p)
        del ds.ImagePositionPatient
        ds.save_as(p)
    with pytest.raises(InputError, match="ImagePositionPatient"): open_query(tmp_path/"f")
    with pytest.raises(InputError, match="name the folder"): open_query(next(dicom(tmp_path/"g", s).iterdir()))
    cut = sorted(dicom(tmp_path/"h", s).iterdir())[2]
    cut.write_bytes(cut.read_bytes()[:-50])
    with pytest.raises(InputError, match=cut.name): list(open_query(tmp_path/"h").frames)


def test_dicom_localizer_and_other_files_are_left_out(tmp_path):
    dicom(tmp_path/"s", ct())
    dicom(tmp_path/"s", ct(2, (8, 8)), uid="1.2.9", ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"], SeriesDescription="scout")
    (tmp_path/"s/README").write_text("hello")
    save(tmp_path/"s/labels.nii.gz", scan()[1], np.eye(4))
    assert len(open_query(tmp_path/"s")) == 6
    assert len(open_query(dicom(tmp_path/"one", ct(1)))) == 1


def test_dicom_scaling_of_each_file_counts(tmp_path):
    s = ct(3)
    for k, p in enumerate(sorted(dicom(tmp_path/"s", s, names=["a", "b", "c"]).iterdir())):
        ds = pydicom.dcmread(p)
        ds.RescaleSlope, ds.RescaleIntercept = k + 1, -1024*(k + 1)
        ds.save_as(p)
    got = open_volume(tmp_path/"s", (0, 4000)).read()
    assert (got == apply_window(s*np.arange(1, 4)[:, None, None], (0, 4000))).all()


def test_dicom_folders_as_examples(tmp_path):
    s = ct()
    query = open_query(dicom(tmp_path/"images/pat1", s))
    masks = np.random.default_rng(1).integers(0, 3, (6, 10, 12))
    path, = write_masks(query, tmp_path/"labels", enumerate(masks))
    path.rename(tmp_path/"labels/pat1.nii.gz")
    examples = open_examples(tmp_path)
    assert list(examples.volumes) == ["pat1"] and (examples[3].labels == masks[3]).all() and (examples[3].image[..., 0] == apply_window(s[3], (40, 400))).all()


# ---- masks ----

def test_the_same_mask_in_many_forms(tmp_path):
    disc, two = shapes()
    for how, mask in (("L 255", np.uint8(255*disc)), ("L 254", np.uint8(254*disc)), ("bool", disc), ("RGB", np.repeat(np.uint8(255*disc)[..., None], 3, 2)), ("one", np.uint8(disc)),
                      ("RGBA", np.dstack([np.full((*disc.shape, 3), 255, np.uint8), np.uint8(255*disc)])), ("16 bit", np.uint16(65535*disc)), ("16 bit number", np.uint16(disc))):
        path = png(tmp_path/f"{how}.png", mask)
        assert (MaskReader([path])(path) == disc).all() and MaskReader([path]).classes == [1], how
        assert (read_binary(path) == disc).all()
    for how, kw in (("palette", dict(palette=[0, 0, 0, 9, 200, 8, 70, 80, 90])), ("numbers", {}), ("grey palette", dict(palette=[v for i in range(256) for v in (i, i, i)]))):
        path = png(tmp_path/f"{how}.png", two, **kw)
        reader = MaskReader([path])
        assert (reader(path) == two).all() and reader.classes == [1, 2]
    assert MaskReader([tmp_path/"palette.png"]).colours == {1: (9, 200, 8), 2: (70, 80, 90)}
    path = png(tmp_path/"wide.png", np.uint16(two)*300)
    assert MaskReader([path]).classes == [300, 600] and (MaskReader([path])(path) == two.astype(int)*300).all()


def test_soft_edges_and_jpeg_are_thresholded(tmp_path):
    disc, _ = shapes()
    for seed in range(8):
        y, x = np.mgrid[:120, :160]
        r = np.random.default_rng(seed)
        blob = ((x - r.uniform(40, 120))/r.uniform(10, 35))**2 + ((y - r.uniform(40, 80))/r.uniform(10, 35))**2 < 1
        soft = Image.fromarray(np.uint8(255*blob)).resize((80, 60), Image.Resampling.LANCZOS)
        for n, kw in (("a.png", {}), ("b.jpg", dict(quality=50)), ("c.jpg", dict(quality=95))):
            soft.save(tmp_path/n, **kw)
            got = MaskReader([tmp_path/n])(tmp_path/n)
            want = np.asarray(Image.open(tmp_path/n)) > 127
            assert (got == want).all() and (got & (np.asarray(soft) > 127)).sum() > .95*got.sum()


def test_levels_of_grey_are_classes_or_refused(tmp_path):
    _, two = shapes()
    path = png(tmp_path/"levels.png", two*63)
    assert MaskReader([path]).classes == [63, 126]
    void = np.where(two == 1, 7, np.where(two == 2, 15, 0)).astype(np.uint8)
    void[:2] = 255
    path = png(tmp_path/"void.png", void)
    assert MaskReader([path]).classes == [7, 15, 255]
    Image.fromarray(two*63).resize((160, 120), Image.Resampling.BICUBIC).save(tmp_path/"soft.png")
    Image.fromarray(two*63).save(tmp_path/"levels.jpg")
    Image.fromarray(two).save(tmp_path/"numbers.jpg")
    colour = np.array([[0, 0, 0], [200, 30, 30], [40, 90, 220]], np.uint8)[two]
    Image.fromarray(colour).save(tmp_path/"colour.jpg")
    Image.fromarray(colour).resize((200, 160), Image.Resampling.BICUBIC).save(tmp_path/"soft colour.png")
    for n, why in (("soft.png", "smoothing"), ("levels.jpg", "JPEG changes"), ("numbers.jpg", "JPEG changes"), ("colour.jpg", "JPEG changes colours"), ("soft colour.png", "smooth"), ("none.png", "No such file")):
        with pytest.raises(InputError, match=why): MaskReader([tmp_path/n])(tmp_path/n)


def test_a_folder_is_judged_as_a_whole(tmp_path):
    "A mask that shows only class 2 of numbers is not a drawing, and an empty one is empty"
    _, two = shapes()
    paths = [png(tmp_path/f"{k}.png", m) for k, m in enumerate((two, np.where(two == 2, two, 0), np.zeros_like(two), np.where(two == 2, 200, 0).astype(np.uint8)))]
    reader = MaskReader(paths)
    assert reader.classes == [1, 2, 200] and set(np.unique(reader(paths[3]))) == {0, 200} and set(np.unique(reader(paths[1]))) == {0, 2} and not reader(paths[2]).any()
    assert MaskReader(paths[2:3]).classes == []


def test_grey_sort_of_numbers_and_drawings():
    hist = lambda **kw: np.array([kw.get(f"v{i}", 0) for i in range(256)])
    assert grey_sort(hist(v0=900, v1=50, v2=50), hist(v0=800, v1=30, v2=30)) == "numbers"
    assert grey_sort(hist(v0=900, v255=100), hist(v0=800, v255=80)) == "drawing"
    assert grey_sort(hist(v0=900, v1=100), hist(v0=800, v1=80), True) is None
    assert grey_sort(hist(v0=900, v128=50, v255=50), hist(v0=800, v128=40, v255=40)) == "numbers"
    assert grey_sort(hist(v0=900, v1=20, v255=50), hist(v0=800, v1=14, v255=40)) == "numbers"


def test_paint_keeps_small_objects():
    disc, two = shapes()
    labels, doubles = paint([(3, np.ones_like(disc)), (1, disc)], disc.shape)
    assert (labels == np.where(disc, 1, 3)).all() and doubles == disc.sum()
    assert paint([], (4, 5))[0].shape == (4, 5)


# ---- picture folders ----

def picture_folder(root, masks, images="images", labels="masks", suffix=".png", **kw):
    for k, m in enumerate(masks):
        png(root/images/f"p{k}.jpg", np.random.default_rng(k).integers(0, 255, (*np.asarray(m).shape[:2], 3)).astype(np.uint8))
        png(root/labels/f"p{k}{suffix}", m, **kw)
    return root


@pytest.mark.parametrize("images,labels", [("imgs", "gts"), ("images", "masks"), ("images", "labels")])
def test_picture_folders(tmp_path, images, labels):
    _, two = shapes()
    root = picture_folder(tmp_path, [two, two.T, np.zeros_like(two)], images, labels, palette=[0, 0, 0, 200, 10, 10, 10, 200, 10])
    examples = open_examples(root)
    assert examples.names == ["p0", "p1", "p2"] and examples.classes == {1: "class 1", 2: "class 2"} and examples.colours == {1: (200, 10, 10), 2: (10, 200, 10)} and not examples.volumes
    assert (examples[1].labels == two.T).all() and examples[1].image.shape == (80, 60, 3) and examples[0].known == {1, 2} and not examples[2].labels.any()
    assert len(list(examples)) == 3
    with pytest.raises(IndexError): examples[3]


def test_pairs_that_do_not_fit(tmp_path):
    disc, _ = shapes()
    root = picture_folder(tmp_path, [np.uint8(255*disc)]*6)
    png(root/"masks/p1.png", np.uint8(255*disc[::2, ::2]))                 # half the size: fitted
    png(root/"masks/p2.png", np.uint8(255*disc.T))                         # turned: refused
    (root/"masks/p3.png").write_bytes(b"no picture")
    (root/"masks/p4.png").rename(root/"masks/q.png")
    (root/"images/p5.jpg").write_bytes(b"")
    examples = open_examples(root)
    assert examples.names == ["p0", "p1"] and examples[1].labels.shape == disc.shape
    assert (examples[1].labels == disc).mean() > .98
    said = {Path(p["file"]).name: p["problem"] for p in examples.problems}
    assert "proportions" in said["p2.png"] and "no picture" in said["p3.png"] and "no mask" in said["p4.jpg"] and "no image" in said["q.png"] and "empty" in said["p5.jpg"]
    info = examples_info(root)
    assert info["examples"] == 2 and {p["problem"] for p in info["problems"]} == set(said.values())
    assert all(p["file"] in examples_text(info) for p in info["problems"])
    json.dumps(info)


def test_one_folder_per_class(tmp_path):
    disc, two = shapes()
    for k in range(3): png(tmp_path/f"imgs/{k}.png", np.uint8(50*two))
    for k in range(3): png(tmp_path/f"gts/liver/{k}.png", np.uint8(255*(two == 1)))
    for k in range(2): png(tmp_path/f"gts/spleen/{k}.png", np.uint8(two == 2))
    examples = open_examples(tmp_path)
    assert examples.classes == {1: "liver", 2: "spleen"} and (examples[0].labels == two).all()
    assert examples[1].known == {1, 2} and examples[2].known == {1}
    (tmp_path/"classes.json").write_text('{"spleen": 3, "liver": 1, "other": 9}')
    examples = open_examples(tmp_path)
    assert examples.classes == {1: "liver", 3: "spleen", 9: "other"} and (examples[0].labels == np.where(two == 2, 3, two)).all() and examples[0].known == {1, 3}
    (tmp_path/"classes.json").write_text('["kidney"]')
    with pytest.raises(InputError, match="liver"): open_examples(tmp_path)
    png(tmp_path/"gts/0.png", two)
    with pytest.raises(InputError, match="one or the other"): open_examples(tmp_path)


def test_folders_in_folders_are_groups(tmp_path):
    _, two = shapes()
    for v, k in itertools.product(("v2", "v10"), (0, 2, 10)):
        png(tmp_path/f"images/{v}/f{k}.png", np.uint8(50*two)), png(tmp_path/f"masks/{v}/f{k}.png", two)
    examples = open_examples(tmp_path)
    assert examples.names == ["v2/f0", "v2/f2", "v2/f10", "v10/f0", "v10/f2", "v10/f10"] and examples.volumes == {"v2": [0, 1, 2], "v10": [3, 4, 5]}


def test_colour_masks(tmp_path):
    _, two = shapes()
    root = picture_folder(tmp_path, [np.array([[0, 0, 0], [200, 30, 30], [40, 90, 220]], np.uint8)[two]])
    examples = open_examples(root)
    assert (examples[0].labels == np.array([0, 2, 1])[two]).all() and len(examples.classes) == 2
    (root/"classes.json").write_text('{"5": {"name": "liver", "color": [200, 30, 30]}, "6": {"name": "spleen", "color": "#285adc"}}')
    examples = open_examples(root)
    assert (examples[0].labels == np.array([0, 5, 6])[two]).all() and examples.colours == {5: (200, 30, 30), 6: (40, 90, 220)}
    (root/"classes.json").write_text('{"5": {"name": "liver", "color": [200, 30, 30]}}')
    with pytest.raises(InputError, match=r"\(40, 90, 220\) belongs to no class"): open_examples(root)


def test_layouts_that_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"): open_examples(tmp_path/"none")
    with pytest.raises(InputError, match="expected imgs/ and gts/.*nothing"): open_examples(tmp_path)
    _, two = shapes()
    root = picture_folder(tmp_path/"a", [two])
    (root/"labels").mkdir()
    with pytest.raises(InputError, match="masks/ and labels/"): open_examples(root)
    (root/"labels").rmdir()
    with pytest.raises(InputError, match="window is for scans"): open_examples(root, (40, 400))
    save(root/"images/v.nii.gz", scan()[0], np.eye(4))
    with pytest.raises(InputError, match="mixes scans"): open_examples(root)
    for n in ("images", "masks"): (tmp_path/"b"/n).mkdir(parents=True)
    with pytest.raises(InputError, match="neither pictures nor scans"): open_examples(tmp_path/"b")
    assert are_examples(root) and not are_examples(tmp_path)


# ---- class files ----

@pytest.mark.parametrize("name,text", [("classes.json", '{"1": "liver", "2": "spleen", "0": "background"}'), ("classes.json", '{"liver": 1, "spleen": 2}'), ("classes.json", '["background", "liver", "spleen"]'),
    ("classes.json", '["liver", "spleen"]'), ("dataset.json", '{"name": "x", "labels": {"background": 0, "liver": 1, "spleen": 2}}'), ("labels.json", '[{"id": 1, "name": "liver"}, {"id": 2, "name": "spleen"}]'),
    ("classes.json", '{"categories": [{"id": 1, "name": "liver"}, {"id": 2, "name": "spleen"}]}'), ("labels.txt", "liver\nspleen"), ("labels.txt", "background\r\nliver\r\nspleen\r\n"),
    ("labels.txt", "# mine\n1 liver\n2 spleen"), ("labels.txt", "1: liver\n2: spleen"), ("classes.txt", "0,background\n1,liver\n2,spleen"),
    ("labels.txt", '# ITK-SNAP\n    0     0    0    0        0  0  0    "Clear Label"\n    1   255    0    0        1  1  1    "liver"\n    2   0  255    0        1  1  1    "spleen"'),
    ("labels.txt", "1 liver 221 130 101 255\n2 spleen 157 108 162 255")])
def test_class_files(tmp_path, name, text):
    (tmp_path/name).write_bytes(text.encode())
    assert read_classes(tmp_path/name)[0] == {1: "liver", 2: "spleen"}


def test_class_files_with_colours_and_broken_ones(tmp_path):
    (tmp_path/"labels.txt").write_text("1 inferior vena cava 221 130 101 255\n2 spleen")
    assert read_classes(tmp_path/"labels.txt") == ({1: "inferior vena cava", 2: "spleen"}, {1: (221, 130, 101)})
    for bad in ("{", '{"a": [1, 2]}', '{"1": 2, "x": "y"}', "3", '[{"name": "liver"}]'):
        (tmp_path/"classes.json").write_text(bad)
        with pytest.raises(InputError, match="classes.json names no classes"): read_classes(tmp_path/"classes.json")


def test_colours_differ():
    near = [class_colour(i) for i in range(1, 42)]
    assert len(set(near)) == 41 and class_colour(0) == (0, 0, 0) and min(max(c) for c in near) > 150


# ---- COCO ----

def inside(x, y, p):
    "Even-odd rule, one point"
    odd = False
    for (x0, y0), (x1, y1) in zip(p, p[1:] + p[:1]):
        if (y0 > y) != (y1 > y) and x0 + (y - y0)*(x1 - x0)/(y1 - y0) <= x: odd = not odd
    return odd


@given(st.lists(st.tuples(st.floats(-5, 20), st.floats(-5, 16)), min_size=3, max_size=8))
@settings(max_examples=150, deadline=None)
def test_polygon_equals_the_point_test(points):
    mask = polygon_mask(np.array(points).ravel(), (15, 12))
    want = np.array([[inside(x + .5, y + .5, points) for x in range(15)] for y in range(12)])
    assert (mask != want).sum() <= 1                                    # a crossing that rounds onto a pixel centre


def test_polygon_of_whole_pixels():
    assert polygon_mask([2, 3, 7, 3, 7, 9, 2, 9], (15, 12)).sum() == 30 and polygon_mask([2, 3, 7, 3, 7, 9, 2, 9], (15, 12))[3:9, 2:7].all()
    assert polygon_mask([-9, -9, 99, -9, 99, 99, -9, 99], (15, 12)).all()


def encode_rle(mask):
    "Runs and COCO's string of a mask"
    flat = np.r_[0, mask.astype(int).ravel(order="F"), -1]
    runs = np.diff(np.r_[0, np.flatnonzero(np.diff(flat))]).tolist()
    text = ""
    for i, x in enumerate(runs):
        x -= runs[i - 2] if i > 2 else 0
        while True:
            c, x = x & 31, x >> 5
            more = x != (-1 if c & 16 else 0)
            text += chr(c + 32*more + 48)
            if not more: break
    return runs, text


@pytest.mark.parametrize("seed", range(20))
def test_run_lengths(seed):
    r = np.random.default_rng(seed)
    mask = r.random((r.integers(1, 40), r.integers(1, 60))) < r.choice([0, .02, .5, .98, 1])
    runs, text = encode_rle(mask)
    for counts in (runs, text, text.encode()): assert (decode_rle(counts, mask.shape) == mask).all()
    with pytest.raises(ValueError, match="sum to"): decode_rle(runs + [1], mask.shape)


def test_run_lengths_as_pycocotools_writes_them():
    disc, _ = shapes()
    assert (decode_rle("]e0;_14M2M4M2O0O2N2O0O2O00000000000000000001N101N2N101N3L3N3LYZ2", (60, 80)) == disc).all()
    assert encode_rle(disc)[1] == "]e0;_14M2M4M2O0O2N2O0O2O00000000000000000001N101N2N101N3L3N3LYZ2"


def coco(root, categories, annotations, images=((1, "a.png"), (2, "b.png")), name="annotations/instances_train.json", size=(80, 60)):
    _, two = shapes()
    for _, n in images: png(root/"images"/n, np.uint8(50*two))
    (root/name).parent.mkdir(parents=True, exist_ok=True)
    (root/name).write_text(json.dumps(dict(images=[dict(id=i, file_name=n, width=size[0], height=size[1]) for i, n in images], categories=categories, annotations=annotations)))
    return root


def test_coco(tmp_path):
    disc, two = shapes()
    runs, text = encode_rle(two == 2)
    root = coco(tmp_path, [dict(id=4, name="disc"), dict(id=7, name="square", color=[1, 2, 3])],
                [dict(image_id=1, category_id=7, segmentation=dict(size=[60, 80], counts=text)), dict(image_id=1, category_id=4, segmentation=dict(size=[60, 80], counts=encode_rle(disc)[0]), iscrowd=1),
                 dict(image_id=1, category_id=4, segmentation=[[0, 50, 5, 50, 5, 55, 0, 55], [70, 50, 75, 50, 75, 55, 70, 55]])])
    want = np.array([0, 4, 7])[two]
    want[50:55, 0:5] = want[50:55, 70:75] = 4
    for path in (root, root/"annotations/instances_train.json"):
        examples = open_examples(path)
        assert examples.classes == {4: "disc", 7: "square"} and examples.colours[7] == (1, 2, 3) and examples.names == ["a", "b"]
        assert (examples[0].labels == want).all() and not examples[1].labels.any() and examples[0].known == {4, 7}
    assert are_examples(root)


def test_coco_counting_from_zero_and_problems(tmp_path):
    square = [[10, 10, 20, 10, 20, 20, 10, 20]]
    root = coco(tmp_path, [dict(id=0, name="disc"), dict(id=1, name="square")],
                [dict(image_id=1, category_id=0, segmentation=square), dict(image_id=1, category_id=1, segmentation=[[1, 2, 3]]), dict(image_id=1, category_id=1), dict(image_id=1, category_id=5, segmentation=square),
                 dict(image_id=2, category_id=1, segmentation=dict(size=[80, 60], counts="0")), dict(image_id=2, category_id=1, segmentation=dict(size=[60, 80], counts=[1, 2]))],
                images=((1, "a.png"), (2, "b.png"), (3, "../../secret.png"), (4, "none.png")))
    (root/"images/none.png").unlink()
    examples = open_examples(root)
    assert examples.classes == {1: "disc", 2: "square"} and examples[0].labels.sum() == 100 and examples.names == ["a", "b"]
    said = " ".join(p["problem"] for p in examples.problems)
    for why in ("three x, y", "no segmentation", "category 5", "run lengths are for 60x80", "sum to 3", "secret.png", "none.png"): assert why in said, why


def test_coco_sizes_and_several_files(tmp_path):
    square = [dict(image_id=1, category_id=1, segmentation=[[10, 10, 20, 10, 20, 20, 10, 20]])]
    root = coco(tmp_path/"a", [dict(id=1, name="x")], square, images=((1, "a.png"),), size=(60, 80))
    with pytest.raises(InputError, match="a.png is 60x80, it is 80x60"): open_examples(root)
    root = coco(tmp_path/"b", [dict(id=1, name="x")], square, images=((1, "a.png"),))
    coco(root, [dict(id=1, name="x")], square, images=((1, "b.png"),), name="annotations/instances_val.json")
    assert open_examples(root).names == ["train/a", "val/b"]
    coco(root, [dict(id=1, name="y")], square, images=((1, "b.png"),), name="annotations/instances_val.json")
    with pytest.raises(InputError, match="different categories"): open_examples(root)
    root = coco(tmp_path/"c", [dict(id=1, name="x")], [dict(image_id=1, category_id=1, bbox=[1, 2, 3, 4])])
    with pytest.raises(InputError, match="no segmentation"): open_examples(root)
    assert not are_examples(root)
    (root/"annotations/instances_train.json").write_text('{"images": ')
    with pytest.raises(InputError, match="not valid JSON"): open_examples(root)


# ---- arrays ----

def test_arrays():
    disc, two = shapes()
    examples = array_examples([np.uint8(50*two), np.zeros((4, 5, 3), np.uint8)], [two, np.zeros((4, 5), bool)], classes={1: "disc"}, known=[{1, 2}, {1}])
    assert examples.classes == {1: "disc", 2: "class 2"} and examples[0].image.shape == (60, 80, 3) and (examples[0].labels == two).all() and examples[1].known == {1}
    for images, labels, why in (([two], [two.T], "shape"), ([two/9], [two], "uint8"), ([two], [two*.5], "whole"), ([two], [], "as many")):
        with pytest.raises(InputError, match=why): array_examples(images, labels)
    assert overlay(np.uint8(50*two), two, {1: (255, 0, 0)}, alpha=1)[disc].tolist()[0] == [255, 0, 0]


# ---- queries ----

def test_pictures_as_queries(tmp_path):
    _, two = shapes()
    for k in (1, 2, 10): png(tmp_path/f"q/im{k}.png", np.full((5 + k, 7, 3), k, np.uint8))
    (tmp_path/"q/im3.jpg").write_bytes(b"broken")
    query = open_query(tmp_path/"q")
    assert query.kind == "images" and query.names == ["im1", "im2", "im3", "im10"] and len(query) == 4
    assert [(i, f.shape, int(f[0, 0, 0])) for i, f in query.items()] == [(0, (6, 7, 3), 1), (1, (7, 7, 3), 2), (3, (15, 7, 3), 10)] and list(query.broken) == [2]
    paths = write_masks(query, tmp_path/"out", ((i, np.full(f.shape[:2], i + 1)) for i, f in query.items()), classes={1: "liver"}, colours={1: (9, 8, 7)})
    assert [p.name for p in paths] == ["im1.png", "im2.png", "im10.png"]
    im = Image.open(paths[0])
    assert im.mode == "P" and (np.asarray(im) == 1).all() and tuple(im.getpalette()[3:6]) == (9, 8, 7)
    assert read_classes(tmp_path/"out/classes.json") == ({1: "liver"}, {1: (9, 8, 7)})
    one = open_query(tmp_path/"q/im2.png")
    assert one.kind == "image" and one.names == ["im2"] and one[0].shape == (7, 7, 3)
    with pytest.raises(InputError, match="cannot be read"): list(open_query(tmp_path/"q/im3.jpg").frames)
    png(tmp_path/"q/im1.jpg", two)
    with pytest.raises(InputError, match="im1"): open_query(tmp_path/"q")


def test_masks_of_a_query_are_examples_again(tmp_path):
    disc, two = shapes()
    examples = array_examples([np.uint8(50*two)]*2, [two, np.uint8(disc)], names=["a", "b"], classes={1: "disc", 2: "square"})
    for e in examples: png(tmp_path/f"images/{e.name}.png", e.image)
    write_masks(open_query(tmp_path/"images"), tmp_path/"masks", ((i, e.labels) for i, e in enumerate(examples)), classes=examples.classes, colours=examples.colours)
    again = open_examples(tmp_path)
    assert again.classes == examples.classes and again.colours == examples.colours and not again.problems
    for a, b in zip(again, examples): assert (a.labels == b.labels).all() and (a.image == b.image).all()


def test_labels_above_255_become_16_bit(tmp_path):
    labels = np.arange(600).reshape(20, 30)
    save_mask(labels, tmp_path/"m.png", {})
    assert (np.asarray(Image.open(tmp_path/"m.png")) == labels).all() and (MaskReader([tmp_path/"m.png"])(tmp_path/"m.png") == labels).all()


def test_videos_as_queries(tmp_path):
    frames = [scene(t, (64, 48)) for t in range(12)]
    path = write_video(tmp_path/"clip.mp4", frames, fps=12)
    query = open_query(path)
    assert query.kind == "video" and len(query) == 12 and query.names[3] == "clip_000003"
    got = list(query.frames)
    assert len(got) == 12 and max(np.abs(a.astype(int) - b).mean() for a, b in zip(got, frames)) < 8
    for k, f in enumerate(frames): png(tmp_path/f"f/{k}.png", f)
    as_pictures, as_video = open_query(tmp_path/"f"), open_query(tmp_path/"f", kind="video")
    assert as_pictures.kind == "images" and as_video.kind == "video" and as_video.names == as_pictures.names
    assert all((a == b).all() for a, b in zip(as_video.frames, frames))
    (tmp_path/"f/5.png").write_bytes(b"broken")
    as_video = open_query(tmp_path/"f", kind="video")
    assert [i for i, _ in as_video.items()] == [k for k in range(12) if k != 5] and list(as_video.broken) == [5]
    path, = write_masks(as_video, tmp_path/"out", [(7, np.ones((48, 64), int))])
    assert path.name == "7.png"
    with pytest.raises(InputError, match="no video"): open_query(tmp_path/"f/1.png", kind="video")


def test_several_queries_and_refusals(tmp_path):
    hu, _ = scan()
    for k in range(3): save(tmp_path/f"scans/s{k}.nii.gz", *stored(hu, "RAS"))
    assert [q.name for q in open_queries(tmp_path/"scans")] == ["s0", "s1", "s2"]
    with pytest.raises(InputError, match="3 scans"): open_query(tmp_path/"scans")
    for k in range(2): dicom(tmp_path/f"study/series{k}", ct(), uid=f"1.2.{k}")
    assert [q.name for q in open_queries(tmp_path/"study")] == ["series0", "series1"]
    assert len(open_queries(tmp_path/"scans/s1.nii.gz")) == 1
    (tmp_path/"empty").mkdir(), (tmp_path/"text").mkdir()
    (tmp_path/"text/a.txt").write_text("a")
    for bad, why in ((tmp_path/"none", "does not exist"), (tmp_path/"empty", "nothing to segment"), (tmp_path/"text", "nothing to segment"), (tmp_path/"text/a.txt", "no picture, scan")):
        with pytest.raises(InputError, match=why): open_query(bad)
    png(tmp_path/"scans/a.png", np.zeros((4, 4), np.uint8))
    with pytest.raises(InputError, match="mixes pictures"): open_query(tmp_path/"scans")
    with pytest.raises(InputError, match="window is for scans"): open_query(tmp_path/"scans/a.png", (40, 400))
    with pytest.raises(InputError, match="kind"): open_query(tmp_path/"scans/a.png", kind="film")
    q = ArrayQuery([np.zeros((4, 5), np.uint8)])
    assert q.names == ["000"] and q[0].shape == (4, 5, 3) and q.size(0) == (5, 4)


# ---- info ----

def test_info_of_scans(tmp_path):
    info = examples_info(scan_folder(tmp_path/"d", ("LPS", "PSR")))
    assert info["examples"] == 10 and [v["orientation"] for v in info["volumes"]] == ["LPS", "PSR"] and info["volumes"][0]["slices"] == 6 and info["volumes"][0]["labelled"] == 5
    assert info["volumes"][1]["spacing_mm"] == list(SPACING) and info["volumes"][0]["window"] == (40, 400) and info["classes"][1]["examples"] == 10
    text = examples_text(info)
    for word in ("10 examples (slices) of 2 scans", "stored PSR", "level 40, width 400", "class 3"): assert word in text
    json.dumps(info)


# ---- real data ----

def linked(root, pairs):
    for i, (image, labels) in enumerate(pairs):
        for folder, path in (("images", image), ("labels", labels)):
            (root/folder).mkdir(parents=True, exist_ok=True)
            (root/folder/(f"v{i + 1}" + ("" if path.is_dir() else ".nii.gz"))).symlink_to(path)
    return root


def test_real_mr(shared_data, tmp_path):
    "Three MR scans: organs on the side where they belong, and labels back exactly"
    folder = shared_data/"chaos-t2-mr"
    root = linked(tmp_path/"mr", [(folder/f"image_{k}.nii.gz", folder/f"label_{k}.nii.gz") for k in (1, 2, 3)])
    (root/"classes.json").write_text('{"1": "liver", "2": "right kidney", "3": "left kidney", "4": "spleen"}')
    examples = open_examples(root)
    assert examples.classes[2] == "right kidney" and not examples.problems and len(examples.volumes) == 3
    for k, at in enumerate(examples.volumes.values(), start=1):
        labels = np.stack([examples.labels(i) for i in at])
        x, y = ({c: np.argwhere(labels == c).mean(0)[a] for c in range(1, 5)} for a in (2, 1))
        assert x[1] < 110 < 140 < x[4] and x[2] < 118 < 138 < x[3]                          # the patient's right on the left
        assert y[2] > y[1]                                                                   # kidneys behind the liver
        image = np.stack([examples.image(i) for i in at])
        assert image.min() == 0 and image.max() == 255 and 10 < image.mean() < 120
        query = open_query(root/f"images/v{k}.nii.gz")
        path, = write_masks(query, tmp_path/"out", enumerate(open_volume(root/f"labels/v{k}.nii.gz").labels()))
        got, want = nib.load(path), nib.load(folder/f"label_{k}.nii.gz")
        assert (np.asanyarray(got.dataobj) == np.asanyarray(want.dataobj)).all() and (got.affine == nib.load(folder/f"image_{k}.nii.gz").affine).all() and got.get_data_dtype() == np.uint8


def test_real_ct(shared_data, tmp_path):
    root = linked(tmp_path/"ct", [(shared_data/"totalseg-ct/ct.nii.gz", shared_data/"totalseg-ct/labels.nii.gz")])
    info = examples_info(root)
    assert info["volumes"][0]["window"] == (40, 400) and len(info["classes"]) == 41 and info["volumes"][0]["orientation"] == "RAS" and info["sizes"] == {"122x101": 30}
    examples = open_examples(root)
    liver = np.stack([examples.labels(i) == 5 for i in range(30)])
    assert np.argwhere(liver).mean(0)[2] < 61                                               # the largest organ lies on the patient's right
    tissue = np.stack([e[..., 0] for e in map(examples.image, range(30))])[liver]
    assert 100 < np.median(tissue) < 220


def test_real_dicom(shared_data, tmp_path):
    "The series is LPS, its labels LAS: one axis runs the other way, and canonical slices overlay"
    folder = shared_data/"dicom-ct"
    query, labels = open_query(folder), open_volume(folder/"labels.nii.gz")
    assert len(query) == 20 and query.volume.orientation == "LPS" and labels.orientation == "LAS" and _same_place(query.volume, labels) is None
    stored_labels = np.asanyarray(nib.load(folder/"labels.nii.gz").dataobj)
    path, = write_masks(query, tmp_path/"out", enumerate(labels.labels()))
    mine = np.asanyarray(nib.load(path).dataobj)
    assert (mine == stored_labels[:, ::-1]).all() and not (mine == stored_labels).all()
    assert np.allclose(nib.load(path).affine[:, 2], labels.affine[:, 2])
    grey, seg = query.grey, labels.labels()
    liver = seg == 5
    assert 100 < np.median(grey[liver]) < 220 and grey[liver].std() < 40 and grey[liver[:, ::-1]].std() > 60      # flipped labels would lie on anything
    assert grey[seg == 0].mean() < 40


def test_real_dicom_as_examples(shared_data, tmp_path):
    examples = open_examples(linked(tmp_path/"d", [(shared_data/"dicom-ct", shared_data/"dicom-ct/labels.nii.gz")]))
    assert len(examples) == 20 and list(examples.volumes) == ["v1"] and not examples.problems


def test_odd_volumes(shared_data):
    folder = shared_data/"odd-volumes"
    with pytest.raises(InputError, match="4 dimensions.*2 volumes"): open_query(folder/"example4d.nii.gz")
    with pytest.raises(InputError, match="colours"): open_query(folder/"rgb_struct.nii.gz")
    tilted = open_query(folder/"CT_pitch.nii.gz")
    assert len(tilted) == 58 and "16.5 degrees askew" in volume_problems(tilted.volume)[0]
    frame = tilted[30]
    assert frame.shape == (248, 175, 3) and frame.max() > 200
    values = np.asanyarray(nib.load(folder/"CT_pitch.nii.gz").dataobj)
    assert (np.asanyarray(write_mask_like(tilted, tilted.volume.labels()).dataobj) == values).all()
    small = open_query(folder/"anatomical.nii")
    assert len(small) == 25 and small.volume.orientation == "LAS" and 40 < small[12].mean() < 220


@pytest.mark.parametrize("mask,least", [("mask_palette.png", 1.), ("mask_254.png", 1.), ("mask_half_size.png", .97), ("mask_jpeg.jpg", .99)])
def test_odd_masks(shared_data, tmp_path, mask, least):
    "Each is the mask of the same frame, in a form of its own"
    for d in ("images", "masks"): (tmp_path/d).mkdir()
    shutil.copy(shared_data/"cvc-clinicdb/images/1.png", tmp_path/"images/1.png")
    shutil.copy(shared_data/"odd-images"/mask, tmp_path/"masks"/f"1{Path(mask).suffix}")
    examples = open_examples(tmp_path)
    got = examples[0].labels > 0
    want = np.asarray(Image.open(shared_data/"cvc-clinicdb/masks/1.png").convert("L")) > 127
    assert examples.classes == {1: "class 1"} and got.shape == want.shape and (got & want).sum()/(got | want).sum() >= least
    if "palette" in mask: assert examples.colours[1] == (200, 30, 30)


def test_odd_images_as_a_query(shared_data):
    folder = shared_data/"odd-images"
    query = open_query(folder)
    good = {query.names[i]: f for i, f in query.items()}
    assert all(f.ndim == 3 and f.shape[2] == 3 and f.dtype == np.uint8 for f in good.values())
    assert {query.names[i] for i in query.broken} == {"broken", "broken_data_stream", "tiff_named", "truncated", "truncated_image"}


def test_cvc_clinicdb(shared_data, tmp_path):
    for d in ("images", "masks"):
        (tmp_path/d).mkdir()
        for k in (1, 2, 15, 122, 200, 264): (tmp_path/d/f"{k}.png").symlink_to(shared_data/f"cvc-clinicdb/{d}/{k}.png")
    examples = open_examples(tmp_path)
    assert examples.classes == {1: "class 1"} and examples.names == ["1", "2", "15", "122", "200", "264"]
    for e in examples:
        assert e.image.shape == (288, 384, 3)
        assert (e.labels == (np.asarray(Image.open(tmp_path/f"masks/{e.name}.png").convert("L")) > 127)).all()
    assert any("dark grey" in p["problem"] for p in examples.problems)


def test_video_of_real_data(shared_data):
    query = open_query(shared_data/"ldpolypvideo/video_101.mp4")
    assert query.kind == "video" and len(query) == 181 and query[3].shape == (480, 560, 3) and query.size(0) == (560, 480)


# ---- which reading is meant: examples, scans, or boxes of a video ----

OUTLINE, BOX = [[10, 10, 20, 12, 18, 25]], [[10, 10, 20, 10, 20, 25, 10, 25]]


def one_object(root, images=({},), **annotation):
    "A COCO folder with one annotation"
    png(root/"images/a.png", np.zeros((60, 80), np.uint8) + np.arange(80, dtype=np.uint8))
    (root/"annotations").mkdir(exist_ok=True)
    data = dict(images=[dict(id=1, file_name="a.png", **im) for im in images], categories=[dict(id=1, name="polyp")],
                annotations=[dict(id=1, image_id=1, category_id=1, bbox=[10, 10, 10, 15], **annotation)])
    (root/"annotations/instances_train.json").write_text(json.dumps(data))
    return root


@pytest.mark.parametrize("annotation,image,examples", [
    (dict(segmentation=OUTLINE), {}, True), (dict(segmentation=dict(size=[60, 80], counts=[4800])), {}, True),
    (dict(segmentation=BOX), {}, False), (dict(segmentation=[BOX[0] + BOX[0][:2]]), {}, False), (dict(segmentation=[]), {}, False), (dict(segmentation=None), {}, False), ({}, {}, False),
    (dict(segmentation=OUTLINE, identity_id="001-001_1"), {}, False), (dict(segmentation=BOX, unique_id="001-001_1"), {}, False), (dict(segmentation=OUTLINE), dict(sequence_id="001-001", frame_id=3), False)])
def test_boxes_that_follow_something_are_no_examples(tmp_path, annotation, image, examples):
    root = one_object(tmp_path/"d", (image,), **annotation)
    for path in (root, root/"annotations/instances_train.json"): assert are_examples(path) == examples


def test_rectangles_without_boxes_are_masks(tmp_path):
    root = one_object(tmp_path/"d", segmentation=BOX)
    file = root/"annotations/instances_train.json"
    file.write_text(file.read_text().replace('"bbox": [10, 10, 10, 15], ', ""))
    assert are_examples(root) and not open_examples(root).problems


def test_masks_made_from_boxes_are_named(tmp_path, capsys):
    examples = open_examples(one_object(tmp_path/"d", segmentation=BOX))
    assert examples[0].labels.sum() == 150 and "no outline was drawn" in examples.problems[0]["problem"]
    assert not open_examples(one_object(tmp_path/"e", segmentation=OUTLINE)).problems


@pytest.mark.parametrize("annotation,examples", [(dict(segmentation=OUTLINE), True), (dict(segmentation=BOX, unique_id="1_1"), False), (dict(segmentation=BOX), False)])
def test_a_large_coco_file_is_not_read_whole(tmp_path, monkeypatch, annotation, examples):
    "Images come first and fill megabytes; the annotations at the end are seen all the same"
    root = one_object(tmp_path/"d", **annotation)
    file = root/"annotations/instances_train.json"
    data = json.loads(file.read_text())
    data["images"] = [dict(id=i, file_name=f"images_{i}.png", width=80, height=60) for i in range(40000)]
    file.write_text(json.dumps(data))
    read, whole = [], Path.read_bytes
    import builtins
    inner = builtins.open
    def counted(path, *args, **kwargs):
        f = inner(path, *args, **kwargs)
        if Path(path) != file: return f
        class Counted:
            def __enter__(self): return self
            def __exit__(self, *a): f.close()
            def seek(self, *a): return f.seek(*a)
            def read(self, n=-1): out = f.read(n); read.append(len(out)); return out
        return Counted()
    monkeypatch.setattr(builtins, "open", counted)
    monkeypatch.setattr(Path, "read_bytes", lambda p: read.append(p.stat().st_size) or whole(p))
    for path in (root, file):
        read.clear()
        assert are_examples(path) == examples and 0 < sum(read) <= 4*(1 << 16) < file.stat().st_size


def test_a_broken_json_file_is_no_example(tmp_path):
    for text in ("", "{", '{"segmentation": ', '{"segmentation": [[1, 2', '{"segmentation": [[1, ,]]}', "\x00\xff"):
        (tmp_path/"x.json").write_text(text)
        assert are_examples(tmp_path/"x.json") in (False, True)
        with pytest.raises(InputError, match="x.json"): open_examples(tmp_path/"x.json")


def test_run_lengths_are_refused_with_a_reason():
    for bad, why in (([1, 2], "sum to 3"), ([-1, 13], "from 0"), ([1.5, 10.5], "whole numbers"), (["a", "b"], "whole numbers"), (None, "got None"), (dict(a=1), "as a list"), ("\x7f\x7f", "run lengths")):
        with pytest.raises(InputError, match=why): decode_rle(bad, (4, 3))
    assert decode_rle([12], (4, 3)).sum() == 0 and decode_rle((0, 12), (4, 3)).all()


def test_broken_run_lengths_name_file_and_reason(tmp_path):
    root = one_object(tmp_path/"d", segmentation=dict(size=[60, 80], counts=[1.5, 2]))
    with pytest.raises(InputError, match="instances_train.json holds no segmentation.*whole numbers"): open_examples(root)


@pytest.mark.parametrize("code", ["RAS", "PSR", "LPI"])
def test_scans_without_labels_are_told(tmp_path, code):
    hu, _ = scan()
    nifti = save(tmp_path/"one/case_0000.nii.gz", *stored(hu, code))
    series = dicom(tmp_path/"ct", to_slices(hu, np.eye(4)))
    for path, name, orientation in ((nifti, "case", code), (tmp_path/"one", "case", code), (series, "ct", "LPS")):
        assert are_scans(path) and not are_examples(path)
        info = scans_info(path)
        v, = info["volumes"]
        assert json.loads(json.dumps(info)) and info["scans"] == 1 and not info["problems"]
        assert (v["name"], v["slices"], tuple(v["size"]), v["orientation"], tuple(v["window"])) == (name, 6, (12, 10), orientation, (40, 400))
        assert v["spacing_mm"] == [2, 3, 5]
        text = scans_text(info)
        for part in (name, "6 slices", "12x10", "2 x 3 x 5 mm", f"stored {orientation}", "level 40, width 400", "no problem"): assert part in text
    assert scans_info(nifti, (-600, 1500))["volumes"][0]["window"] == (-600, 1500)


def test_a_folder_of_scans_tells_of_each_and_of_what_is_wrong(tmp_path):
    hu, _ = scan()
    for name in ("a", "b"): save(tmp_path/f"d/{name}.nii.gz", *stored(hu, "RAS"))
    dicom(tmp_path/"d/series", to_slices(hu, np.eye(4)))
    save(tmp_path/"d/flat.nii.gz", *stored(np.full_like(hu, 7), "RAS"))
    (tmp_path/"d/cut.nii.gz").write_bytes((tmp_path/"d/a.nii.gz").read_bytes()[:900])
    info = scans_info(tmp_path/"d")
    assert are_scans(tmp_path/"d") and sorted(v["name"] for v in info["volumes"]) == ["a", "b", "flat", "series"]
    said = {Path(p["file"]).name: p["problem"] for p in info["problems"]}
    assert set(said) == {"flat.nii.gz", "cut.nii.gz"} and "one colour" in said["flat.nii.gz"] and "cut short" in said["cut.nii.gz"]
    with pytest.raises(InputError, match="cut short"): scans_info(tmp_path/"d/cut.nii.gz")
    for n in ("a", "b", "flat"): (tmp_path/f"d/{n}.nii.gz").write_bytes((tmp_path/"d/cut.nii.gz").read_bytes())
    shutil.rmtree(tmp_path/"d/series")
    with pytest.raises(InputError, match="no scan can be read"): scans_info(tmp_path/"d")


def test_one_folder_a_patient(tmp_path):
    hu, _ = scan()
    for p in ("p1", "p2"): save(tmp_path/f"d/{p}/{p}.nii.gz", *stored(hu, "RAS"))
    assert are_scans(tmp_path/"d") and scans_info(tmp_path/"d")["scans"] == 2


def test_what_is_no_scan(tmp_path):
    scan_folder(tmp_path/"labelled")
    (tmp_path/"videos").mkdir()
    write_video(tmp_path/"videos/a.mp4", [scene(i) for i in range(3)])
    png(tmp_path/"pictures/a.png", np.zeros((9, 9), np.uint8))
    for p in ("001-001_annotations/001-001_1.xml", "001-001_frames/001-001_1.jpg", "001-001_frames/001-001_2.jpg"):
        (tmp_path/"real"/p).parent.mkdir(parents=True, exist_ok=True), (tmp_path/"real"/p).write_bytes(b"x")
    for name in ("labelled", "videos", "videos/a.mp4", "pictures", "pictures/a.png", "real", "absent"): assert not are_scans(tmp_path/name), name
    with pytest.raises(InputError, match="does not exist"): scans_info(tmp_path/"absent")
    with pytest.raises(InputError, match="holds no scan"): scans_info(tmp_path/"real")
    one = next(dicom(tmp_path/"ct", np.zeros((3, 8, 8))).iterdir())
    assert are_scans(one)
    with pytest.raises(InputError, match="one slice of a DICOM series"): scans_info(one)


def test_labels_of_another_size_are_not_laid_over():
    with pytest.raises(InputError, match="shape of the image"): overlay(np.zeros((6, 8), np.uint8), np.zeros((8, 6), int), {})


@pytest.mark.parametrize("module", ["phantom", "examples", "time_contrast", "segmenter", "segmentation_metrics"])
def test_what_is_public_is_described(module):
    "A docstring on every public class, function and method, and a comment for each of their arguments"
    code = Path(importlib.import_module(f"freerep.{module}").__file__).read_text()
    lines, missing = code.splitlines(), []
    exempt = {"set_epoch", "forward", "save", "after_epoch", "after_fit"}        # named by PyTorch and the `Learner`
    for node in ast.parse(code).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"): continue
        if not ast.get_docstring(node): missing.append(node.name)
        inner = [m for m in node.body if isinstance(m, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
        for f in inner + ([node] if isinstance(node, ast.FunctionDef) else []):
            public = not f.name.startswith("_") or f.name == "__init__"
            if f in inner and public and f.name not in exempt | {"__init__"} and not ast.get_docstring(f): missing.append(f"{node.name}.{f.name}")
            own = [a for a in f.args.args + f.args.kwonlyargs if a.arg != "self"]
            if public and f.name not in exempt: missing += [f"{node.name}.{f.name}: {a.arg}" for a in own if "#" not in lines[a.lineno - 1]]
    assert not missing
