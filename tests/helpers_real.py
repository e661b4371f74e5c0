"""Real scans and real polyps as examples, and masks found from some examples of a bank only."""
import json
from pathlib import Path

import nibabel as nib
import numpy as np

CHAOS_ORGANS = {"1": "liver", "2": "right kidney", "3": "left kidney", "4": "spleen"}


def link(path, target):
    "A symbolic link to a file, with the folder that it lies in"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(Path(target).resolve())


def chaos_pair(folder, shared_data, scans):
    "Some of the scans 1, 2, 3 as images/chaos_N.nii.gz + labels/chaos_N.nii.gz. Returns the folder"
    folder, data = Path(folder), Path(shared_data)/"chaos-t2-mr"
    for n in scans:
        link(folder/f"images/chaos_{n}.nii.gz", data/f"image_{n}.nii.gz")
        link(folder/f"labels/chaos_{n}.nii.gz", data/f"label_{n}.nii.gz")
    (folder/"classes.json").write_text(json.dumps(CHAOS_ORGANS))
    return folder


def cvc_sequences(shared_data):
    "{sequence: its frames in order}"
    found = {}
    for image, sequence in json.loads((Path(shared_data)/"cvc-clinicdb/frame_to_sequence.json").read_text()).items(): found.setdefault(int(sequence), []).append(int(image))
    return {s: sorted(frames) for s, frames in sorted(found.items())}


def cvc_pair(folder, shared_data, frames):
    "Frames {sequence: numbers} as images/SS/N.png + masks/SS/N.png. Returns the folder"
    folder, data = Path(folder), Path(shared_data)/"cvc-clinicdb"
    for s, numbers in frames.items():
        for n in numbers:
            for kind in ("images", "masks"): link(folder/kind/f"{s:02d}/{n}.png", data/kind/f"{n}.png")
    (folder/"classes.json").write_text('{"1": "polyp"}')
    return folder


def place(path):
    "What must not change on the way from a scan to its labels: shape, orientation, affine"
    im = nib.load(path)
    return dict(shape=list(im.shape), orientation="".join(nib.aff2axcodes(im.affine)), affine=im.affine.tolist())


def context_among(bank, i, allowed, k):
    "Indices of the examples that `freerep segment` would take as context of example i if the bank held only `allowed`"
    from freerep.context import select_context
    allowed = np.asarray(allowed)
    return allowed[select_context(bank.vectors[i], bank.vectors[allowed], k, present=bank.present[allowed])]
