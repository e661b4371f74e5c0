"""The example bank: memories are those of the segmenter, never stale, bounded on disk, and shared by processes."""
import functools
import json
import multiprocessing as mp
import os
import shutil
from importlib.util import find_spec

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from freerep.bank import ExampleBank, MemoryShelf, content_key, make_bank, memory_key, open_bank
from freerep.context import random_context
from freerep.core import InputError, read_json, write_json
from freerep.examples import array_examples, open_examples, save_mask
from freerep.segmenter import Memory, load_segmenter

pytestmark = pytest.mark.skipif(find_spec("sam2") is None, reason="the package sam2 is not installed")


class Mean:
    "A retriever whose vectors can be told by hand; counts what it embeds"
    def __init__(self, fingerprint="mean"): self.fingerprint, self.count, self.path, self.name = fingerprint, 0, None, "random"
    def embed(self, images):
        self.count += len(images)
        v = np.stack([np.append(np.asarray(x, np.float32).mean((0, 1)), 50.) for x in images]).astype(np.float32)
        return v/np.linalg.norm(v, axis=1, keepdims=True)


@functools.cache
def nano(seed=0, size=None): return load_segmenter("nano", device="cpu", seed=seed, image_size=size)


def picture(i, h=40, w=56):
    r = np.random.default_rng([i, 3])
    labels, (y, x) = np.zeros((h, w), np.int32), np.mgrid[:h, :w]
    for c in (1, 2, 5):
        if c == 5 and i % 2: continue
        cy, cx, radius = r.uniform(8, h - 8), r.uniform(8, w - 8), r.uniform(5, 9)
        labels[(y - cy)**2 + (x - cx)**2 < radius**2] = c
    return r.integers(0, 256, (h, w, 3), dtype=np.uint8), labels


def write(folder, n=6):
    (folder/"images").mkdir(parents=True)
    for i in range(n):
        image, labels = picture(i)
        Image.fromarray(image).save(folder/f"images/{i}.png")
        save_mask(labels, folder/f"masks/{i}.png", {})
    write_json({1: "a", 2: "b", 5: "c"}, folder/"classes.json")
    return folder


@pytest.fixture
def folder(tmp_path): return write(tmp_path/"examples")


def reference(bank, i, classes=None):
    e = bank.examples[i]
    return bank.segmenter.remember(bank.segmenter.encode(e.image[None]), np.stack([e.labels == c for c in classes or bank.ids]))


def same(a, b): return torch.equal(a.maskmem, b.maskmem) and torch.equal(a.pointer, b.pointer)


def encoded(segmenter, f):
    before = segmenter.encodings
    return f(), segmenter.encodings - before


# ---------------------------------------------------------------- memories

@pytest.mark.parametrize("on_disk", [False, True])
def test_memories_are_the_segmenters_bit_for_bit(folder, tmp_path, on_disk):
    where = tmp_path/"bank" if on_disk else None
    bank = ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=where)
    found, n = encoded(nano(), lambda: bank.memories(range(6)))
    assert n == 6 and all(same(m, reference(bank, i)) for i, m in enumerate(found))
    assert all(m.maskmem.dtype == torch.bfloat16 and m.pointer.dtype == torch.float32 for m in found)
    again, n = encoded(nano(), lambda: bank.memories(range(6)))
    assert n == 0 and all(map(same, found, again))
    if on_disk:
        fresh = ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=where)
        assert fresh.shelf.ram.bytes == 0
        again, n = encoded(nano(), lambda: fresh.memories(range(6)))
        assert n == 0 and all(map(same, found, again))


def test_classes_in_any_order_and_number_come_from_one_encoding(folder):
    bank = ExampleBank(folder, retriever=Mean(), segmenter=nano())
    assert bank.ids == [1, 2, 5]
    m, n = encoded(nano(), lambda: bank.memory(0, [5, 1]))
    assert n == 1 and same(m, reference(bank, 0, [5, 1]))
    m, n = encoded(nano(), lambda: bank.memory(0, [1, 2, 5, 1]))    # only 2 is missing
    assert n == 1 and same(m, reference(bank, 0, [1, 2, 5, 1])) and len(bank.shelf) == 3


def test_one_empty_memory_per_image(tmp_path):
    "Ten classes of which one shows: two files"
    image, labels = picture(1)
    bank = ExampleBank(array_examples([image], [(labels == 1).astype(int)], classes={c: str(c) for c in range(1, 11)}), retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    m = bank.memory(0)
    assert len(bank.shelf) == 2 and all(same(m[c], m[1]) for c in range(2, 10)) and not same(m[0], m[1])
    assert same(m[1], nano().empty_memory(nano().encode(image[None])))


def test_a_mask_too_small_for_the_square_counts_as_the_segmenter_sees_it():
    "One pixel of a large picture vanishes at 64 px"
    labels = np.zeros((400, 400), int); labels[5, 5] = 1; labels[100:200, 100:200] = 2
    bank = ExampleBank(array_examples([picture(0, 400, 400)[0]], [labels]), retriever=Mean(), segmenter=nano())
    assert same(bank.memory(0), reference(bank, 0)) and bank.present.all()


def test_present_and_known():
    images, labels = zip(*[picture(i) for i in range(3)])
    bank = ExampleBank(array_examples(images, labels, classes={1: "a", 2: "b", 5: "c"}, known=[{1, 2, 5}, {1, 2}, {1}]), retriever=Mean(), segmenter=nano())
    assert bank.present.tolist() == [[True, True, i != 1] for i in range(3)]
    assert bank.counts([0, 1, 2]).tolist() == [[True]*3, [True, True, False], [True]*3]          # what shows is known, whatever is said
    assert bank.counts([1, 0], [5, 1], absent="ignore").tolist() == [[False, True], [True, True]]
    with pytest.raises(InputError, match="absent='x'"): bank.counts([0], absent="x")


# ---------------------------------------------------------------- nothing stale

def test_changed_mask_is_computed_anew_and_only_that(folder, tmp_path):
    get = lambda: ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    bank = get()
    old = bank.memory(2)
    labels = np.array(Image.open(folder/"masks/2.png")); labels[:6, :6] = 2
    save_mask(labels, folder/"masks/2.png", {})
    bank = get()
    new, n = encoded(nano(), lambda: bank.memory(2))
    assert n == 1 and bank.changes == {"with another mask": ["2"]} and same(new, reference(bank, 2))
    assert same(new[0], old[0]) and not same(new[1], old[1])


def test_changed_image_gets_new_memories_and_a_new_vector(folder, tmp_path):
    retriever = Mean()
    get = lambda: ExampleBank(folder, retriever=retriever, segmenter=nano(), folder=tmp_path/"b")
    old = get()
    assert retriever.count == 6
    before = old.memory(1)
    Image.fromarray(255 - picture(1)[0]).save(folder/"images/1.png")
    bank = get()
    assert retriever.count == 7 and bank.changes == {"with another image": ["1"]}
    assert not np.allclose(bank.vectors[1], old.vectors[1]) and np.array_equal(np.delete(bank.vectors, 1, 0), np.delete(old.vectors, 1, 0))
    new, n = encoded(nano(), lambda: bank.memory(1))
    assert n == 1 and same(new, reference(bank, 1)) and not same(new, before)
    get()
    assert retriever.count == 7 and get().changes == {}


@pytest.mark.parametrize("other", [lambda: nano(1), lambda: nano(0, 96)])
def test_other_weights_or_size_share_nothing(folder, tmp_path, other):
    a = ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    a.memory(0)
    b = ExampleBank(folder, retriever=Mean(), segmenter=other(), folder=tmp_path/"b")
    m, n = encoded(b.segmenter, lambda: b.memory(0))
    assert n == 1 and same(m, reference(b, 0)) and len(a.shelf) == 6


def test_weights_changed_in_place_under_an_open_bank(folder):
    segmenter = load_segmenter("nano", device="cpu", seed=5)
    bank = ExampleBank(folder, retriever=Mean(), segmenter=segmenter)
    old = bank.memory(0)
    with torch.no_grad(): segmenter.model.memory_encoder.out_proj.weight.mul_(1.5)
    new, n = encoded(segmenter, lambda: bank.memory(0))
    assert n == 1 and same(new, reference(bank, 0)) and not same(new, old)


def test_files_changed_under_an_open_bank(folder):
    bank = ExampleBank(folder, retriever=Mean(), segmenter=nano())
    known = bank.memory(0)
    for i in (0, 1): Image.fromarray(255 - picture(i)[0]).save(folder/f"images/{i}.png")
    assert same(bank.memory(0), known)
    with pytest.raises(InputError, match="example 1 changed while the bank was open"): bank.memory(1)


def test_another_retriever_embeds_everything_anew(folder, tmp_path):
    ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    other = Mean("another")
    ExampleBank(folder, retriever=other, segmenter=nano(), folder=tmp_path/"b")
    assert other.count == 6


def test_renamed_classes_and_files_keep_their_memories(folder, tmp_path):
    "Names are no part of a memory; a class number is not either"
    ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b").memories(range(6))
    for kind in ("images", "masks"): (folder/kind/"0.png").rename(folder/kind/"9.png")
    write_json({1: "liver", 2: "b", 5: "c"}, folder/"classes.json")
    retriever = Mean()
    bank = ExampleBank(folder, retriever=retriever, segmenter=nano(), folder=tmp_path/"b")
    _, n = encoded(nano(), lambda: bank.memories(range(6)))
    assert n == 0 and retriever.count == 0 and bank.changes == {"new": ["9"], "gone": ["0"]} and bank.classes[1] == "liver"


@pytest.mark.parametrize("damage", ["cut", "wrong", "missing"])
def test_vectors_that_do_not_belong_to_the_list_are_not_used(folder, tmp_path, damage):
    a = ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    path = tmp_path/"b/vectors.npy"
    if damage == "cut": path.write_bytes(path.read_bytes()[:60])
    elif damage == "wrong": np.save(path, a.vectors[::-1])
    else: path.unlink()
    retriever = Mean()
    b = ExampleBank(folder, retriever=retriever, segmenter=nano(), folder=tmp_path/"b")
    assert retriever.count == 6 and np.array_equal(a.vectors, b.vectors) and np.array_equal(np.load(path), a.vectors)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40))
def test_every_pixel_counts(seed, h, w):
    r = np.random.default_rng(seed)
    a = r.integers(0, 3, (h, w), dtype=np.uint8)
    b = a.copy(); b[r.integers(h), r.integers(w)] ^= 1
    assert content_key(a) == content_key(a.copy(order="F")) != content_key(b)
    assert content_key(a) != content_key(a.astype(np.int32)) and content_key(a) != content_key(a[None])


def test_keys_do_not_run_into_each_other():
    assert len({memory_key("ab", "c", "d"), memory_key("a", "bc", "d"), memory_key("a", "b", "cd"), memory_key("ab", None, "cd")}) == 4


# ---------------------------------------------------------------- the shelf

def mem(value=0): return Memory(torch.full((1, 32, 4, 4), value, dtype=torch.bfloat16), torch.full((1, 64), float(value)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=40), st.integers(1, 5))
def test_ram_shelf_is_least_recently_used(asked, room):
    shelf, reference = MemoryShelf(None, room*(1024 + 256)), []
    for key in asked:
        assert (shelf.get(str(key)) is not None) == (key in reference)
        if key in reference: reference.remove(key)
        else: shelf.put(str(key), mem(key))
        reference = (reference + [key])[-room:]
        assert list(map(int, shelf.ram.kept)) == reference and shelf.bytes == len(reference)*1280 <= shelf.max_bytes
        assert shelf.get(str(key)).pointer[0, 0] == key


@pytest.mark.parametrize("limit", [3_000, 20_000, 100_000])
def test_folder_never_exceeds_its_limit(tmp_path, limit):
    shelf = MemoryShelf(tmp_path, limit)
    for i in range(90):
        shelf.put(str(i), mem(i))
        assert shelf.bytes <= limit and shelf.path(str(i)).exists()
    assert shelf.bytes > .5*limit


def test_what_is_used_stays(tmp_path):
    shelf = MemoryShelf(tmp_path, 20_000)
    shelf.put("dear", mem())
    for i in range(100):
        shelf.put(str(i), mem(i))
        os.utime(shelf.path(str(i)), ns=(i + 1, i + 1))          # long ago
        assert shelf.get("dear") is not None and shelf.path("dear").exists()
    assert not shelf.path("0").exists()


def test_files_that_vanish_or_are_damaged_count_as_missing(folder, tmp_path):
    get = lambda: ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    known = get().memory(0)
    for k, (_, _, path) in enumerate(get().shelf.files()):
        if k == 0: path.unlink()
        elif k == 1: path.write_bytes(path.read_bytes()[:100])
        else: path.write_bytes(b"")
    bank = get()
    again, n = encoded(nano(), lambda: bank.memory(0))
    assert n == 1 and same(again, known)
    again, n = encoded(nano(), lambda: get().memory(0))
    assert n == 0 and same(again, known)


def test_somebody_else_evicts_while_the_folder_is_scanned(tmp_path, monkeypatch):
    shelf = MemoryShelf(tmp_path, 4000)
    shelf.put("a", mem()); shelf.put("b", mem())
    listed = MemoryShelf.files
    def raced(self):
        found = listed(self)
        for _, _, path in found: path.unlink(missing_ok=True)
        return found
    monkeypatch.setattr(MemoryShelf, "files", raced)
    shelf.put("c", mem(3))
    assert MemoryShelf(tmp_path).get("c").pointer[0, 0] == 3


def test_a_bank_that_evicts_still_answers(folder, tmp_path):
    bank = ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b", max_bytes=4000)
    for _ in range(2):
        assert all(same(m, reference(bank, i)) for i, m in enumerate(bank.memories(range(6)))) and bank.shelf.bytes <= 4000
    with pytest.raises(InputError, match="not even one memory"): ExampleBank(folder, retriever=Mean(), segmenter=nano(), max_bytes=500)


def _fill(examples, folder, queue, max_bytes):
    torch.set_num_threads(1)
    bank = ExampleBank(examples, retriever=Mean(), segmenter=load_segmenter("nano", device="cpu"), folder=folder, max_bytes=max_bytes)
    queue.put([content_key(bank.memory(i).maskmem.float().numpy()) for _ in range(2) for i in range(len(bank))])


@pytest.mark.parametrize("max_bytes", [None, 6000])
def test_two_processes(folder, tmp_path, max_bytes):
    context = mp.get_context("fork")
    queue = context.Queue()
    both = [context.Process(target=_fill, args=(folder, tmp_path/"b", queue, max_bytes)) for _ in range(2)]
    for p in both: p.start()
    answers = [queue.get(timeout=120) for _ in both]
    for p in both: p.join()
    bank = ExampleBank(folder, retriever=Mean(), segmenter=nano())
    assert answers[0] == answers[1] == [content_key(reference(bank, i).maskmem.float().numpy()) for i in range(6)]*2
    assert not list((tmp_path/"b").rglob("*.tmp"))


# ---------------------------------------------------------------- on disk

def test_make_and_open(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_bank("examples", "BANK", sam2="nano", retriever="random", max_bytes=10**6)
    memory = made.memory(0)
    assert {p.name for p in (tmp_path/"BANK").iterdir()} == {".freerep", "config.json", "examples.json", "vectors.npy", "memories"}
    v = np.load(tmp_path/"BANK/vectors.npy")
    assert v.dtype == np.float32 and len(v) == 6 and np.allclose(np.linalg.norm(v, axis=1), 1, atol=1e-5)
    monkeypatch.chdir("/")
    bank = open_bank(tmp_path/"BANK", device="cpu")
    again, n = encoded(bank.segmenter, lambda: bank.memory(0))
    assert n == 0 and same(memory, again) and np.array_equal(bank.vectors, made.vectors) and bank.shelf.max_bytes == 10**6 and bank.changes == {}
    with pytest.raises(InputError, match="exists already"): make_bank(folder, tmp_path/"BANK", sam2="nano")
    assert len(make_bank(folder, tmp_path/"BANK", sam2="nano", force=True).shelf) == 0


def test_a_window_stays_with_the_bank(folder, tmp_path):
    "A bank of scans looks at them in its window, when it is made and when it is opened"
    r = np.random.default_rng(0)
    for kind in ("images", "labels"): (tmp_path/"scans"/kind).mkdir(parents=True)
    for i in range(2):
        labels = np.zeros((24, 20, 4), np.uint8); labels[4:12, 5:15] = 1
        values = r.normal(-80, 20, labels.shape) + 200*labels
        nib.save(nib.Nifti1Image(values.astype(np.int16), np.eye(4)), tmp_path/f"scans/images/s{i}.nii.gz")
        nib.save(nib.Nifti1Image(labels, np.eye(4)), tmp_path/f"scans/labels/s{i}.nii.gz")
    made = {w: make_bank(tmp_path/"scans", tmp_path/f"BANK{w}", sam2="nano", window=w) for w in (None, (100, 60), (100, 800))}
    for w, bank in made.items():
        expected = open_examples(tmp_path/"scans", w)
        assert len(bank) == 8 and all(np.array_equal(bank.examples.image(i), expected.image(i)) for i in range(8))
        again = open_bank(tmp_path/f"BANK{w}", device="cpu")
        assert again.changes == {} and np.array_equal(again.examples.image(3), bank.examples.image(3)) and np.array_equal(again.vectors, bank.vectors)
    assert not np.array_equal(made[100, 60].examples.image(0), made[100, 800].examples.image(0)) and not np.allclose(made[100, 60].vectors, made[100, 800].vectors)
    for window, why in (((100, 0), "width a positive one"), ("wide", "expected .level, width.")):
        with pytest.raises(InputError, match=why): make_bank(tmp_path/"scans", tmp_path/"NONE", sam2="nano", window=window)
    with pytest.raises(InputError, match="a window is for scans"): make_bank(folder, tmp_path/"NONE", sam2="nano", window=(40, 400))
    assert not (tmp_path/"NONE").exists()


def test_open_tells_what_changed(folder, tmp_path, capsys):
    make_bank(folder, tmp_path/"BANK", sam2="nano")
    save_mask(np.zeros((40, 56), int), folder/"masks/3.png", {})
    for kind in ("images", "masks"): (folder/kind/"4.png").unlink()
    bank = open_bank(tmp_path/"BANK", device="cpu")
    err = capsys.readouterr().err
    assert "1 gone (4)" in err and "1 with another mask (3)" in err and len(bank) == 5 and not bank.present[3].any()
    assert len(np.load(tmp_path/"BANK/vectors.npy")) == 5


@pytest.mark.parametrize("what", ["examples", "checkpoint"])
def test_open_says_what_moved(folder, tmp_path, what):
    nano().save(tmp_path/"w.safetensors")
    make_bank(folder, tmp_path/"BANK", sam2="nano", checkpoint=tmp_path/"w.safetensors")
    moved = folder if what == "examples" else tmp_path/"w.safetensors"
    moved.rename(tmp_path/"elsewhere")
    with pytest.raises(InputError, match="no longer there"): open_bank(tmp_path/"BANK")


def test_a_checkpoint_that_was_replaced(folder, tmp_path, capsys):
    nano().save(tmp_path/"w.safetensors")
    made = make_bank(folder, tmp_path/"BANK", sam2="nano", checkpoint=tmp_path/"w.safetensors")
    old = made.memory(0)
    nano(1).save(tmp_path/"w.safetensors")
    bank = open_bank(tmp_path/"BANK", device="cpu")
    m, n = encoded(bank.segmenter, lambda: bank.memory(0))
    assert n == 1 and same(m, reference(bank, 0)) and not same(m, old) and "weights changed" in capsys.readouterr().err


def test_what_is_no_bank(tmp_path, folder):
    with pytest.raises(InputError, match="holds no bank"): open_bank(folder)
    (tmp_path/"b").mkdir()
    for content in ("[]", "{}", "{"):
        (tmp_path/"b/config.json").write_text(content)
        with pytest.raises(InputError, match="config.json"): open_bank(tmp_path/"b")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"retriever": 1, "vectors": 2, "examples": 3}'])
def test_a_damaged_list_is_made_again(folder, tmp_path, content):
    a = ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    good = (tmp_path/"b/examples.json").read_text()
    (tmp_path/"b/examples.json").write_text(content)
    b = ExampleBank(folder, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    assert np.array_equal(a.vectors, b.vectors) and json.loads(good) == read_json(tmp_path/"b/examples.json")


def test_examples_that_cannot_be_read_are_left_out(folder, capsys):
    path = folder/"images/2.png"
    path.write_bytes(path.read_bytes()[:3000])
    bank = ExampleBank(folder, retriever=Mean(), segmenter=nano())
    assert len(bank) == len(bank.vectors) == len(bank.present) == 5 and bank.examples.names == ["0", "1", "3", "4", "5"] and "1 of 6 examples" in capsys.readouterr().err
    assert same(bank.memory(2), reference(bank, 2))


def test_no_class_at_all():
    with pytest.raises(InputError, match="no class"): ExampleBank(array_examples([picture(0)[0]], [np.zeros((40, 56), int)]), retriever=Mean(), segmenter=nano())


def test_strategies_are_what_they_are_called(tmp_path):
    "Nothing is exchanged unless somebody asks for every class to be shown"
    r = np.random.default_rng(0)
    examples = array_examples(list(r.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)), [np.full((16, 16), 1 + i % 8) for i in range(24)])
    bank = ExampleBank(examples, retriever=Mean(), segmenter=nano())
    for query in r.integers(0, 256, (5, 16, 16, 3), dtype=np.uint8):
        similar = bank.vectors @ bank.embed(query)
        assert bank.select(query, 5, "topk").tolist() == np.argsort(similar)[-5:].tolist()
        assert set(bank.select(query, 5, "random", seed=3).tolist()) == set(random_context(24, 5, 3).tolist())
        assert bank.select(query, 9, "topk", cover=True).tolist() != bank.select(query, 9, "topk").tolist() or bank.present[bank.select(query, 9, "topk")].any(0).all()
        assert bank.present[bank.select(query, 9, "topk", cover=True)].any(0).all()


def test_select_is_by_similarity_and_takes_vectors_too(folder):
    bank = ExampleBank(folder, retriever=Mean(), segmenter=nano())
    query = picture(50)[0]
    order = np.argsort(bank.vectors @ bank.embed(query))
    assert bank.select(query, 6, "topk").tolist() == bank.select(bank.embed(query), 6, "topk").tolist() == order.tolist()
    assert len(bank.select(query, 100)) == 6
    with pytest.raises(InputError, match="k=0"): bank.select(query, 0)


def test_real_scans(shared_data, tmp_path):
    "Two abdominal MR scans as examples: the memories are the segmenter's, one file per shown class and one per image"
    scans = tmp_path/"mr"
    for kind in ("images", "labels"): (scans/kind).mkdir(parents=True)
    for i in (1, 2):
        for kind in ("image", "label"): shutil.copy(shared_data/f"chaos-t2-mr/{kind}_{i}.nii.gz", scans/f"{kind}s/scan{i}.nii.gz")
    examples = open_examples(scans)
    some = examples.subset(range(0, len(examples), 12))
    bank = ExampleBank(some, retriever=Mean(), segmenter=nano(), folder=tmp_path/"b")
    assert all(same(m, reference(bank, i)) for i, m in enumerate(bank.memories(range(len(bank)))))
    shown, lacking = int(bank.present.sum()), int((~bank.present.all(1)).sum())
    assert len(bank.shelf) == shown + lacking
