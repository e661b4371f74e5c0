"Synthetic procedures: exact labels, honest gaps, the same files for the same seed, a complete layout"
import hashlib, subprocess, sys
import xml.etree.ElementTree as ET
from pathlib import Path
import numpy as np, pandas as pd, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from freerep.core import InputError, rng
from freerep.synth import *
from freerep import synth

torch.set_num_threads(1)

def runs_of(strip, lesion, least=8):
    "Runs of frames that show a polyp, holes of one frame allowed, at least `least` long"
    seen = [t for t, boxes in enumerate(strip) if any(b.lesion == lesion for b in boxes)]
    return [r for r in np.split(seen, np.flatnonzero(np.diff(seen) > 2) + 1) if len(r) >= least]

@pytest.fixture(scope="module")
def whole():
    "Boxes of every frame of full-length procedures (small frames: what is seen does not depend on the size)"
    return [(p, [boxes for *_, boxes in p.batches()]) for p in (Procedure(1200 + c, 1500, size=64, cohort=c) for c in range(2))]

@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    return write_procedures(tmp_path_factory.mktemp("synth")/"out", 5, frames=60, size=64, seed=1300, workers=1)

def tree(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob("*")) if p.is_file()}

# ---- the share of positives, visits and gaps: what makes the method learn

def test_most_frames_show_no_polyp(whole):
    for p, strip in whole: assert .12 <= np.mean([bool(b) for b in strip]) <= .28

def test_every_polyp_comes_back_after_a_gap(whole):
    gaps, lengths = [], []
    for p, strip in whole:
        assert len(p.polyps) == 4
        for polyp in p.polyps:
            runs = runs_of(strip, polyp.lesion)
            gaps += [b[0] - a[-1] - 1 for a, b in zip(runs, runs[1:])]
            assert 3 <= len(runs) <= 9
            lengths += [len(r) for r in runs]
    assert 10 <= np.median(lengths) <= 20 and np.median(gaps) >= 20 and np.mean(np.array(gaps) >= 16) >= .85

def test_visits_differ_in_distance_and_roll(whole):
    for p, strip in whole:
        for polyp in p.polyps:
            at = [r[len(r)//2] for r in runs_of(strip, polyp.lesion)]
            assert np.ptp(polyp.s - p.camera.s[at]) > .2 and np.ptp(p.camera.roll[at]) > .3

def test_brightness_forgets_faster_than_bag_members_are_apart(whole):
    for p, _ in whole:
        x = p.light.gain.log().mean(1).numpy()
        assert x.std() > .2 and abs(np.corrcoef(x[:-16], x[16:])[0, 1]) < .2

@pytest.mark.parametrize("frames,polyps", [(40, 1), (200, 1), (750, 2), (1500, 4), (9000, 12)])
def test_plan_scales(frames, polyps):
    for seed in range(20):
        p, legs, length = plan(frames, rng(seed, "plan"))
        assert len(p) == polyps and {q.lesion for q in p} == set(range(1, polyps + 1))
        assert sum(l.frames for l in legs) >= frames and all(0 < l.s < length - 8 for l in legs) and length <= 66
        visits = [l.look for l in legs if l.look]
        assert len(visits) >= (2 if frames >= 100 else 1)*polyps and all(0 < q.s < length for q in p)

def test_short_procedure_has_a_polyp_twice():
    for seed in (1400, 1401, 1402):
        p = Procedure(seed, 200, size=64)
        strip = [boxes for *_, boxes in p.batches()]
        assert max(len(runs_of(strip, q.lesion)) for q in p.polyps) >= 2

# ---- determinism

def test_same_seed_same_frames_any_order():
    a, b = Procedure(7001, 60, size=96, cohort=2), Procedure(7001, 60, size=96, cohort=2)
    images, labels = a.render(range(16, 24))
    again = b.render(range(16, 24))
    assert (images == again[0]).all() and (labels == again[1]).all()
    alone, label = b.render([19])
    assert np.abs(alone[0].astype(int) - images[3]).max() <= 2 and (label[0] == labels[3]).mean() > .999
    assert (Procedure(7002, 60, size=96, cohort=2).render([19])[0] != alone).mean() > .5

def test_files_do_not_depend_on_number_or_processes(layout, tmp_path):
    two = write_procedures(tmp_path/"two", 2, frames=60, size=64, seed=1300, workers=2)
    files = tree(two)
    frames = {k: v for k, v in files.items() if "/" in k}
    assert len(frames) > 240 and frames.items() <= tree(layout).items()
    other = tree(write_procedures(tmp_path/"other", 1, frames=60, size=64, seed=1301, workers=1))
    assert not {v for k, v in other.items() if k.endswith(".jpg")} & set(frames.values())

# ---- layout

def test_layout_is_complete_and_tables_agree(layout):
    names = ["901-001", "901-002", "902-001", "903-001", "904-001"]
    info, lesions = pd.read_csv(layout/"video_info.csv"), pd.read_csv(layout/"lesion_info.csv")
    assert list(info.unique_video_name) == names and (info.fps == 6.25).all() and (info.num_frames == 60).all()
    assert sorted(p.name for p in layout.iterdir()) == sorted([f"{n}_{k}" for n in names for k in ("frames", "annotations", "masks")] + [".freerep", "video_info.csv", "lesion_info.csv"])
    for name, count in zip(names, info.num_lesions):
        assert {p.name for p in (layout/f"{name}_frames").iterdir()} == {f"{name}_{t}.jpg" for t in range(60)}
        assert {p.name for p in (layout/f"{name}_annotations").iterdir()} == {f"{name}_{t}.xml" for t in range(60)}
        seen = {o.findtext("unique_id") for p in (layout/f"{name}_annotations").iterdir() for o in ET.parse(p).iter("object")}
        assert len(seen) == count and seen == set(lesions.unique_object_id[lesions.unique_video_name == name])

def test_masks_agree_with_boxes_exactly(layout):
    boxes_seen = 0
    for folder in layout.glob("*_annotations"):
        video = folder.name[:7]
        for path in folder.iterdir():
            root, mask_path = ET.parse(path).getroot(), layout/f"{video}_masks"/f"{path.stem}.png"
            size = Image.open(layout/f"{video}_frames"/f"{path.stem}.jpg").size
            assert size == (int(root.findtext("size/width")), int(root.findtext("size/height")))
            objects = root.findall("object")
            assert mask_path.exists() == bool(objects)
            if not objects: continue
            mask = np.asarray(Image.open(mask_path))
            assert mask.shape == size[::-1] and set(np.unique(mask)) - {0} == {int(o.findtext("unique_id").split("_")[1]) for o in objects}
            for o in objects:
                assert [c.tag for c in o] == ["name", "unique_id", "box_id", "bndbox"] and [c.tag for c in o.find("bndbox")] == ["xmin", "xmax", "ymin", "ymax"]
                y, x = np.nonzero(mask == int(o.findtext("unique_id").split("_")[1]))
                assert [int(c.text) for c in o.find("bndbox")] == [x.min(), x.max() + 1, y.min(), y.max() + 1]
                boxes_seen += 1
    assert boxes_seen > 10

def test_names_are_not_in_the_official_split(layout):
    assert all(int(v) > 900 for v in (p.name.split("-")[0] for p in layout.glob("*_frames")))

def test_cohorts_differ():
    sizes, colours = set(), []
    for c in range(4):
        p = Procedure(7100, 60, size=80, cohort=c)
        sizes.add(p.size)
        colours.append(np.mean([i[p.view.numpy() == 1].mean(0) for i in p.render(range(8))[0]], 0))
    assert len(sizes) == 4 and all(w % 2 == h % 2 == 0 for w, h in sizes)
    assert min(np.abs(a - b).max() for i, a in enumerate(colours) for b in colours[:i]) > 2

def test_size_scales_frames_and_boxes():
    assert Procedure(7101, 40, size=128).size == (128, 102) and Procedure(7101, 40, size=64).size == (64, 52)

# ---- bad arguments

@pytest.mark.parametrize("change,says", [
    (dict(procedures=0), "procedures=0"), (dict(procedures=2.5), "procedures=2.5"), (dict(procedures=True), "procedures=True"),
    (dict(frames=39), "frames=39: expected a whole number of at least 40"), (dict(size=63), "size=63"), (dict(seed=-1), "seed=-1"),
    (dict(workers=0), "workers=0"), (dict(frames="many"), "frames='many'")])
def test_bad_arguments_write_nothing(change, says, tmp_path):
    with pytest.raises(InputError, match=says.replace(".", r"\.")): write_procedures(tmp_path/"out", **change)
    assert not list(tmp_path.iterdir())

def test_existing_folder_is_kept(tmp_path):
    (tmp_path/"out").mkdir(); (tmp_path/"out"/"mine.txt").write_text("keep")
    with pytest.raises(InputError, match="exists already"): write_procedures(tmp_path/"out", 1, frames=40, size=64)
    assert (tmp_path/"out"/"mine.txt").read_text() == "keep" and len(list(tmp_path.iterdir())) == 1

def test_a_dead_worker_is_reported(tmp_path):
    "A script without a guard cannot start processes: it must say so, not hang"
    script = tmp_path/"script.py"
    script.write_text(f"from freerep.synth import write_procedures\nwrite_procedures({str(tmp_path/'out')!r}, 2, frames=40, size=64, workers=2)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "a worker process died" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["script.py"]

def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def broken(*_): raise OSError("disk full")
    monkeypatch.setattr(synth, "annotation_xml", broken)
    with pytest.raises(OSError, match="disk full"): write_procedures(tmp_path/"out", 1, frames=40, size=64, workers=1)
    assert not list(tmp_path.iterdir())

# ---- parts against references

def test_noise_against_scipy_free_reference():
    gen = np.random.default_rng(0)
    for h, w, rows, cols in ((7, 9, 2, 3), (30, 41, 11, 5), (5, 64, 1, 1)):
        knots = gen.standard_normal((rows + 3, cols))
        bspline = lambda d: (4 - 6*d**2 + 3*d**3)/6 if d < 1 else max(2 - d, 0)**3/6
        want = np.zeros((h, w))
        for y in range(h):
            for x in range(w):
                v, u = (y + .5)*rows/h, (x + .5)*cols/w
                for i in range(rows + 3):
                    for j in range(-4, cols + 4): want[y, x] += bspline(abs(v + 1 - i))*bspline(abs(u - j))*knots[i, (j + 1) % cols]
        np.testing.assert_allclose(spline_surface(torch.tensor(knots, dtype=torch.float32), (h, w)), want, atol=1e-5)

@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_boxes_are_tight_and_slivers_are_gone(seed):
    gen = np.random.default_rng(seed)
    labels = np.zeros((40, 50), np.uint8)
    for k in range(1, gen.integers(1, 5)):
        y, x, h, w = gen.integers(0, 38), gen.integers(0, 48), gen.integers(1, 30), gen.integers(1, 30)
        labels[y:y + h, x:x + w] = k
    before = labels.copy()
    boxes = find_boxes(labels, 6)
    for k in range(1, 5):
        y, x = np.nonzero(before == k)
        box = next((b for b in boxes if b.lesion == k), None)
        large = len(y) > 0 and min(np.ptp(x), np.ptp(y)) + 1 >= max(6, (max(np.ptp(x), np.ptp(y)) + 1)/4) and len(y) >= 18
        assert (box is not None) == large == (labels == k).any()
        if box: assert box[1:] == (x.min(), y.min(), x.max() + 1, y.max() + 1)

@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_rays_end_on_the_wall(seed):
    gen = torch.Generator().manual_seed(seed)
    origin = torch.cat([torch.rand(3, 2, generator=gen)*.6 - .3, torch.rand(3, 1, generator=gen)], 1)[..., None, None]
    ray = torch.randn(3, 3, 5, 7, generator=gen)
    radius = .5 + .5*torch.rand(3, 5, 7, generator=gen)
    lam = reach(origin, ray, radius)
    aside = (ray[:, :2]**2).sum(1) > .01
    assert (lam[aside] > 0).all()
    torch.testing.assert_close((origin + lam[:, None]*ray)[:, :2].norm(dim=1)[aside], radius[aside], atol=1e-4, rtol=1e-4)

def test_march_finds_a_plateau():
    "A wall that stands .3 into the tube everywhere is met at .7, whatever the ray"
    relief, origin = torch.full((1, 1, 60, 96), .3), torch.tensor([.1, .2, 0])[None, :, None, None]
    ray = rays((16, 12), 8, torch.tensor([[.3], [.2], [-.1]]))
    torch.testing.assert_close(march(relief, 10, origin, ray), torch.full((1, 12, 16), .7), atol=1e-5, rtol=0)

def test_a_fold_hides_what_lies_behind():
    "Rays that pass above a step at depth 2 meet the flat wall; those below its edge meet the step"
    relief = torch.zeros(1, 1, 400, 96); relief[..., 200:220, :] = .4
    origin = torch.zeros(1, 3, 1, 1)
    slope = torch.tensor([.25, .31, .35, .45, .6])        # distance from the axis gained for one unit of depth
    ray = torch.stack([slope, slope*0, torch.ones(5)])[None, :, None]
    radius = march(relief, 100, origin, ray, steps=60)[0, 0]
    hits = (radius*1/slope).tolist()
    assert radius[0] == pytest.approx(1, abs=.02)                      # .25*2.2 = .55 < .6: passes inside the step
    assert all(1.9 < s < 2.25 for s in hits[1:4]) and (radius[1:4] < .95).all()
    assert radius[4] == pytest.approx(1, abs=.02) and hits[4] < 2      # meets the wall before the step

def test_blur_against_direct_convolution():
    image = torch.rand(2, 3, 15, 17, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([[.8, 1.5], [2., .4]])
    got = blur(image, sigma)
    for t in range(2):
        for y, x in ((0, 0), (7, 8), (14, 3)):
            wx = torch.exp(-.5*((torch.arange(17) - x)/sigma[t, 0])**2); wy = torch.exp(-.5*((torch.arange(15) - y)/sigma[t, 1])**2)
            want = (image[t]*wy[:, None]*wx).sum((1, 2))/wx.sum()/wy.sum()
            torch.testing.assert_close(got[t, :, y, x], want, atol=1e-5, rtol=1e-5)

def test_what_hides_the_wall_hides_the_label():
    p = Procedure(7200, 300, size=80)
    for t, _, labels, _ in p.batches():
        assert not labels[(p.view.numpy() <= .5) | p.ink.numpy()].any()
    tool = (p.light.tool > .3).nonzero()[:, 0].numpy()[:8]
    cover, _ = instrument(p.size, p.light.tool[tool], p.light.point[tool])
    if len(tool): assert not p.render(tool)[1][cover.numpy()].any()
