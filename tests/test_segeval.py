"""Dice and IoU against loops, scikit-learn and torchmetrics; pairing, orientation, sizes, and what is refused."""
import json

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from freerep.core import InputError, write_json
from freerep.examples import save_mask, save_nifti
from freerep.segmentation_metrics import dice, iou, overlaps, score_overlaps, segeval, segeval_table, segeval_text


def random_labels(seed, s=5, h=9, w=11, classes=4):
    "Two label stacks that agree in about two thirds of the pixels, some slices empty"
    r = np.random.default_rng(seed)
    truth = r.integers(0, classes + 1, (s, h, w))*(r.random((s, 1, 1)) < .7)*(r.random((s, h, w)) < .6)
    pred = np.where(r.random(truth.shape) < .35, r.integers(0, classes + 1, truth.shape), truth)*(r.random((s, 1, 1)) < .8)
    return pred.astype(np.uint8), truth.astype(np.uint8)


def by_loop(scans, classes):
    "{class: (dice per slice, IoU per slice, dice per volume, IoU per volume)}, None where nothing is defined"
    out = {}
    for c in classes:
        per = [[], [], [], []]
        for pred, truth in scans:
            for pieces, at in ((list(zip(pred, truth)), 0), ([(pred, truth)], 2)):
                for p, t in pieces:
                    p, t = p == c, t == c
                    if not (p.any() or t.any()): continue
                    per[at].append(2*(p & t).sum()/(p.sum() + t.sum()))
                    per[at + 1].append((p & t).sum()/(p | t).sum())
        out[c] = [float(np.mean(x)) if x else None for x in per]
    return out


def scan(labels, path, affine=None, axes=None):
    "Write slices (s, h, w) as NIfTI, stored along other axes if asked"
    im = nib.Nifti1Image(np.asarray(labels).transpose(2, 1, 0), np.diag([-1., -1., 3., 1.]) if affine is None else affine)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_nifti(im if axes is None else im.as_reoriented(nib.orientations.ornt_transform(nib.io_orientation(im.affine), nib.orientations.axcodes2ornt(axes))), path)
    return path


def scores(result): return {s["class"]: [s[k] for k in ("dice_slice", "iou_slice", "dice_volume", "iou_volume")] for s in result["classes"]}


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        for x, y in zip(a[k], b[k]): assert (x is None) == (y is None) and (x is None or x == pytest.approx(y, abs=1e-12)), (k, a[k], b[k])


# ---------------------------------------------------------------- counts and ratios

@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=3, max_dims=3, max_side=6), elements=st.integers(0, 70000)), st.randoms(use_true_random=False))
def test_overlaps_count_what_a_loop_counts(pred, random):
    truth = np.array([random.choice([v, 0, 3, 255]) for v in pred.ravel()]).reshape(pred.shape)
    got = {(r.slice, r[2]): (r.both, r.pred, r.truth) for r in overlaps(pred, truth).itertuples()}
    want = {}
    for k in range(len(pred)):
        for c in set(pred[k].ravel()) | set(truth[k].ravel()) - {0}:
            p, t = pred[k] == c, truth[k] == c
            if c: want[k, int(c)] = (int((p & t).sum()), int(p.sum()), int(t.sum()))
    assert got == want


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_dice_and_iou_bound_each_other(both, more_pred, more_truth):
    d, j = dice(both, both + more_pred, both + more_truth), iou(both, both + more_pred, both + more_truth)
    if both + more_pred + more_truth == 0: assert np.isnan(d) and np.isnan(j)
    else: assert 0 <= j <= d <= 1 and j == pytest.approx(d/(2 - d)) and (d == 1) == (more_pred == more_truth == 0)


@pytest.mark.parametrize("seed", range(8))
def test_pixels_as_scikit_learn_counts_them(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    pred, truth = random_labels(seed)
    rows = overlaps(pred, truth).groupby("class")[["both", "pred", "truth"]].sum()
    labels = rows.index.tolist()
    np.testing.assert_allclose(dice(rows.both, rows.pred, rows.truth), metrics.f1_score(truth.ravel(), pred.ravel(), labels=labels, average=None, zero_division=0))
    np.testing.assert_allclose(iou(rows.both, rows.pred, rows.truth), metrics.jaccard_score(truth.ravel(), pred.ravel(), labels=labels, average=None, zero_division=0))


def test_slices_as_torchmetrics_scores_them():
    torch, functional = pytest.importorskip("torch"), pytest.importorskip("torchmetrics.functional.segmentation")
    pred, truth = random_labels(3, s=6)
    want = functional.dice_score(torch.tensor(pred).long(), torch.tensor(truth).long(), num_classes=5, include_background=True, average="none", input_format="index").numpy()
    want = want if want.ndim == 2 else np.stack([functional.dice_score(torch.tensor(pred[k:k + 1]).long(), torch.tensor(truth[k:k + 1]).long(), num_classes=5, include_background=True,
                                                                       average="none", input_format="index").numpy().ravel() for k in range(6)])
    rows = overlaps(pred, truth)
    assert len(rows) > 10
    for r in rows.itertuples(): assert dice(r.both, r.pred, r.truth) == pytest.approx(want[r.slice, r[2]], abs=1e-6)


def test_shapes_must_agree():
    for a, b in (((3, 4), (4, 3)), ((2, 3, 4), (3, 4)), ((1, 2, 3, 4), (1, 2, 3, 4))):
        with pytest.raises(InputError, match="one shape"): overlaps(np.zeros(a, int), np.zeros(b, int))


# ---------------------------------------------------------------- whole folders

@pytest.mark.parametrize("seed", range(6))
def test_scans_score_as_a_loop_scores_them(tmp_path, seed):
    scans = [random_labels([seed, i], s=4 + i) for i in range(3)]
    for i, (p, t) in enumerate(scans):
        scan(p, tmp_path/f"p/case_{i}_seg.nii.gz", axes=("SPL", "RAS", None)[i])
        scan(t, tmp_path/f"t/case_{i}.nii.gz", axes=(None, "LIA", "PSR")[i])
    result = segeval(tmp_path/"p", tmp_path/"t")
    found = sorted({int(c) for p, t in scans for c in np.unique([*p.ravel(), *t.ravel()])} - {0})
    same(scores(result), by_loop(scans, found))
    assert result["slices"] == 4 + 5 + 6 and result["pairs"] == 3
    for s in result["classes"]: assert s["slices"] + s["slices_undefined"] == 15 and s["volumes"] + s["volumes_undefined"] == 3
    for each, (p, t) in zip(result["each"], scans): assert [each["dice"][c] for c in found] == pytest.approx([by_loop([(p, t)], [c])[c][2] for c in found], nan_ok=True)
    for k, at in (("dice_slice", 0), ("iou_volume", 3)): assert result["mean"][k] == pytest.approx(np.mean([v[at] for v in scores(result).values()]))


def test_pictures_count_as_slices(tmp_path):
    pairs = [random_labels([9, i], s=1) for i in range(5)]
    for i, (p, t) in enumerate(pairs):
        save_mask(p[0], tmp_path/f"p/seq/{i}.png", {}), save_mask(t[0], tmp_path/f"t/seq/{i}.png", {})
    result = segeval(tmp_path/"p", tmp_path/"t")
    classes = [s["class"] for s in result["classes"]]
    same({c: v[:2] for c, v in scores(result).items()}, {c: v[:2] for c, v in by_loop(pairs, classes).items()})
    assert all(v[2:] == [None, None] for v in scores(result).values()) and result["slices"] == result["pairs"] == 5
    assert "dice_volume" not in segeval_table(result) and "5 pictures" in segeval_text(result)


def test_false_and_missed_slices_count_zero(tmp_path):
    truth, pred = np.zeros((2, 4, 6, 6), np.uint8)
    truth[0, :3, :3] = pred[0, :3, :3] = 1    # right
    pred[1, 0, 0] = 1                         # invented
    truth[2, 5, 5] = 1                        # missed; slice 3 is empty in both
    result = segeval(scan(pred, tmp_path/"p.nii.gz"), scan(truth, tmp_path/"t.nii.gz"))
    s, = result["classes"]
    assert (s["dice_slice"], s["slices"], s["slices_undefined"], s["false_slices"], s["missed_slices"]) == (pytest.approx(1/3), 3, 1, 1, 1)
    assert s["dice_volume"] == pytest.approx(2*9/20)


def test_undefined_is_null_and_counted(tmp_path):
    truth = np.zeros((2, 5, 5), np.uint8)
    truth[0, 2, 2] = 2
    scan(truth, tmp_path/"t/a.nii.gz"), scan(truth, tmp_path/"p/a_seg.nii.gz")
    write_json({1: "liver", 2: "spleen"}, tmp_path/"p/classes.json")
    result = json.loads(json.dumps(segeval(tmp_path/"p", tmp_path/"t")))
    liver, spleen = result["classes"]
    assert liver["dice_slice"] is None and liver["iou_volume"] is None and liver["slices_undefined"] == 2 and liver["volumes_undefined"] == 1
    assert spleen["dice_volume"] == 1 and result["mean"]["dice_volume"] == 1 and result["mean"]["classes_undefined"] == 1
    assert result["each"][0]["dice"] == {"1": None, "2": 1.0} and "1 of 2 classes occur" in segeval_text(result)
    nothing = segeval(scan(0*truth, tmp_path/"x.nii.gz"), scan(0*truth, tmp_path/"y.nii.gz"))
    assert nothing["classes"] == [] and nothing["mean"]["dice_slice"] is None


def test_classes_by_number_name_and_dictionary(tmp_path):
    p, t = random_labels(5)
    scan(p, tmp_path/"p/a.nii.gz"), scan(t, tmp_path/"t/a.nii.gz")
    (tmp_path/"t/classes.json").write_text('{"1": "liver", "2": "spleen"}')
    run = lambda c: [(s["class"], s["name"]) for s in segeval(tmp_path/"p", tmp_path/"t", classes=c)["classes"]]
    assert run(None) == [(1, "liver"), (2, "spleen"), (3, "class 3"), (4, "class 4")]
    assert run(["Spleen", 3]) == run(["3", 2]) == [(2, "spleen"), (3, "class 3")] and run({4: "four"}) == [(4, "four")] and run("liver") == run(1) == [(1, "liver")]
    all_classes, few = segeval(tmp_path/"p", tmp_path/"t"), segeval(tmp_path/"p", tmp_path/"t", classes=[2])
    assert few["classes"] == [s for s in all_classes["classes"] if s["class"] == 2] and few["mean"]["dice_slice"] == few["classes"][0]["dice_slice"]
    for bad in (["kidney"], [0], ["background"]):
        with pytest.raises(InputError, match="unknown class"): run(bad)


def test_unpaired_masks_are_named(tmp_path, capsys):
    p, t = random_labels(6)
    for n in "ab": scan(p, tmp_path/f"p/{n}_seg.nii.gz")
    for n in "bc": scan(t, tmp_path/f"t/{n}.nii.gz")
    result = segeval(tmp_path/"p", tmp_path/"t")
    assert (result["pairs"], result["without_prediction"], result["without_truth"]) == (1, ["c"], ["a_seg"]) and "1 of 2 truths have no prediction" in capsys.readouterr().err
    assert "no prediction for c" in segeval_text(result)


def test_flare_names_pair(tmp_path):
    p, t = random_labels(7)
    scan(p, tmp_path/"p/FLARE22_Tr_0001_seg.nii.gz"), scan(p, tmp_path/"p/FLARE22_Tr_0002_seg.nii.gz")
    scan(t, tmp_path/"t/FLARE22_Tr_0001.nii.gz"), scan(t, tmp_path/"t/FLARE22_Tr_0002_0000.nii.gz")
    assert [e["name"] for e in segeval(tmp_path/"p", tmp_path/"t")["each"]] == ["FLARE22_Tr_0001", "FLARE22_Tr_0002"]


def test_a_folder_of_examples_is_a_truth(tmp_path):
    pairs = [random_labels([8, i], s=1, classes=2) for i in range(3)]
    for i, (p, t) in enumerate(pairs):
        for c, name in ((1, "a"), (2, "b")):
            (tmp_path/f"ex/masks/{name}").mkdir(parents=True, exist_ok=True)
            Image.fromarray((255*(t[0] == c)).astype(np.uint8)).save(tmp_path/f"ex/masks/{name}/{i}.png")
        (tmp_path/"ex/images").mkdir(exist_ok=True)
        Image.fromarray(np.zeros((9, 11, 3), np.uint8)).save(tmp_path/f"ex/images/{i}.png")
        save_mask(p[0], tmp_path/f"p/{i}.png", {})
    result = segeval(tmp_path/"p", tmp_path/"ex")
    same({c: v[:2] for c, v in scores(result).items()}, {c: v[:2] for c, v in by_loop(pairs, [1, 2]).items()})
    assert [s["name"] for s in result["classes"]] == ["a", "b"]
    for i, (p, t) in enumerate(random_labels([18, j]) for j in range(2)):
        scan(t, tmp_path/f"vol/labels/{i}.nii.gz"), scan(30*t, tmp_path/f"vol/images/{i}_0000.nii.gz"), scan(p, tmp_path/f"pv/{i}_seg.nii.gz")
    same(scores(segeval(tmp_path/"pv", tmp_path/"vol")), scores(segeval(tmp_path/"pv", tmp_path/"vol/labels")))


def test_white_drawings_are_one_class(tmp_path):
    truth = np.zeros((8, 8), np.uint8)
    truth[2:6, 2:6] = 1
    Image.fromarray(255*truth).save(tmp_path/"t.png")
    save_mask(truth, tmp_path/"p.png", {1: (255, 0, 0)})
    s, = segeval(tmp_path/"p.png", tmp_path/"t.png")["classes"]
    assert (s["class"], s["dice_slice"]) == (1, 1)


def test_a_truth_of_another_size_is_fitted_and_told(tmp_path):
    truth = np.zeros((8, 8), np.uint8)
    truth[2:6, 2:6] = 1
    save_mask(truth, tmp_path/"t.png", {}), save_mask(truth.repeat(2, 0).repeat(2, 1), tmp_path/"p.png", {})
    result = segeval(tmp_path/"p.png", tmp_path/"t.png")
    assert result["classes"][0]["dice_slice"] == 1 and "brought to the size" in result["problems"][0]


def test_names_that_contradict_are_told(tmp_path, capsys):
    p, t = random_labels(4)
    scan(p, tmp_path/"p/a.nii.gz"), scan(t, tmp_path/"t/a.nii.gz")
    write_json({1: "spleen", 2: "Aorta"}, tmp_path/"p/classes.json"), write_json({1: "liver", 2: "aorta"}, tmp_path/"t/classes.json")
    assert segeval(tmp_path/"p", tmp_path/"t")["problems"] == ["class 1 is 'spleen' in the prediction and 'liver' in the truth"]
    assert "'spleen' in the prediction" in capsys.readouterr().err


# ---------------------------------------------------------------- refusals

def test_refusals_name_the_file_and_the_reason(tmp_path):
    p, t = random_labels(2)
    good = scan(t, tmp_path/"t/a.nii.gz")
    moved, cases = np.diag([-1., -1., 3., 1.]), []
    moved[2, 3] = 5
    cases += [(scan(p, tmp_path/"moved.nii.gz", affine=moved), good, "mm apart"), (scan(p[:-1], tmp_path/"short.nii.gz"), good, "voxels against"),
              (scan(p[:, ::-1], tmp_path/"mirror.nii.gz", affine=np.diag([-1., 1., 3., 1.])), good, "mm apart")]
    save_mask(p[0], tmp_path/"a.png", {}), save_mask(p[0][:, :5], tmp_path/"b.png", {})
    cases += [(tmp_path/"a.png", good, "one kind"), (tmp_path/"a.png", tmp_path/"b.png", "different pictures"), (tmp_path/"none", good, "does not exist")]
    (tmp_path/"empty").mkdir(), (tmp_path/"notes.txt").write_text("x")
    cases += [(tmp_path/"empty", good, "holds no masks"), (tmp_path/"notes.txt", good, "is no mask")]
    scan(p, tmp_path/"mix/a.nii.gz"), save_mask(p[0], tmp_path/"mix/a.png", {})
    cases += [(tmp_path/"mix", good, "mixes scans")]
    scan(p, tmp_path/"q/x.nii.gz"), scan(p, tmp_path/"q/y.nii.gz")
    cases += [(tmp_path/"q", tmp_path/"t", "has the name of a truth")]
    save_nifti(nib.Nifti1Image(np.full((11, 9, 5), .5, np.float32), np.diag([-1., -1., 3., 1.])), tmp_path/"soft.nii.gz")
    cases += [(tmp_path/"soft.nii.gz", good, "whole number")]
    for pred, truth, why in cases:
        with pytest.raises(InputError, match=why): segeval(pred, truth)


def test_tables_read_from_counts_alone():
    pred, truth = random_labels(11)
    result = score_overlaps(overlaps(pred, truth).assign(name="x"), {"x": len(pred)}, {1: "one", 9: "nine"})
    assert result["classes"][1]["dice_slice"] is None and result["classes"][0]["dice_volume"] == pytest.approx(by_loop([(pred, truth)], [1])[1][2])


def test_real_scans(shared_data, tmp_path):
    label = shared_data/"chaos-t2-mr/label_3.nii.gz"
    im = nib.load(label)
    truth = np.asarray(im.dataobj)
    worse = np.roll(truth, 3, axis=0)
    flipped = nib.Nifti1Image(worse, im.affine).as_reoriented(nib.orientations.axcodes2ornt("SRA"))
    nib.save(flipped, tmp_path/"image_3_seg.nii.gz")
    got, perfect = segeval(tmp_path/"image_3_seg.nii.gz", label), segeval(label, label)
    for s, full in zip(got["classes"], perfect["classes"]):
        p, t = worse == s["class"], truth == s["class"]
        assert full["dice_volume"] == full["iou_slice"] == 1 and s["dice_volume"] == pytest.approx(2*(p & t).sum()/(p.sum() + t.sum()))


# ---------------------------------------------------------------- what commands leave behind

def test_several_scans_lie_in_folders_of_their_own(tmp_path):
    "`freerep segment` puts each of several scans into a folder; a name that ends like another is not guessed"
    p, t = random_labels(20)
    for n in (2, 3): scan(p, tmp_path/f"p/chaos_{n}/chaos_{n}_seg.nii.gz"), scan(t, tmp_path/f"t/chaos_{n}.nii.gz")
    result = segeval(tmp_path/"p", tmp_path/"t")
    assert result["pairs"] == 2 and not result["without_prediction"] and not result["without_truth"]
    scan(p, tmp_path/"p/other/chaos_3_seg.nii.gz")
    assert [e["name"] for e in segeval(tmp_path/"p", tmp_path/"t")["each"]] == ["chaos_2/chaos_2"]


def test_classes_that_never_meet_are_told(tmp_path, capsys):
    "A truth whose numbers no prediction has is numbered otherwise; a class that is only missed is no reason to ask"
    one = np.zeros((12, 12), np.uint8); one[3:9, 3:9] = 1
    save_mask(one, tmp_path/"p.png", {})
    edged = 255*one; edged[6:9, 3:9] = 11                       # read as two classes, for there is nothing that tells a smoothed edge from a class
    Image.fromarray(edged).save(tmp_path/"t.png")
    problems = segeval(tmp_path/"p.png", tmp_path/"t.png")["problems"]
    assert "the prediction shows classes 1 and the truth 11, 255" in problems[-1] and "numbered alike" in capsys.readouterr().err
    for other in (np.zeros_like(one), 2*one + (np.arange(12) > 10)[:, None].astype(np.uint8)):
        save_mask(other, tmp_path/"q.png", {})
        assert not segeval(tmp_path/"p.png", tmp_path/"q.png")["problems"]


def test_truth_in_a_coco_file_of_rectangles(tmp_path):
    "A file that is named as the truth holds masks, also where its outlines are no more than boxes"
    (tmp_path/"images").mkdir()
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(tmp_path/"images/a.png")
    write_json(dict(images=[dict(id=1, file_name="a.png")], categories=[dict(id=1, name="polyp")],
                    annotations=[dict(id=1, image_id=1, category_id=1, bbox=[5, 5, 10, 8], segmentation=[[5, 5, 15, 5, 15, 13, 5, 13]])]), tmp_path/"truth.json")
    mask = np.zeros((20, 30), np.uint8)
    mask[5:13, 5:10] = 1
    (tmp_path/"p").mkdir()
    Image.fromarray(mask).save(tmp_path/"p/a.png")
    s, = segeval(tmp_path/"p", tmp_path/"truth.json")["classes"]
    assert s["name"] == "polyp" and s["dice_slice"] == pytest.approx(2*40/120)
