"""CVC-ClinicDB as procedures: sequences of real polyps, written in the REAL-Colon layout."""
import json
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from helpers import write_realcolon


def largest_blob(mask):
    "x0, y0, x1, y1 (half-open) of the largest connected region above 127; what else a mask holds is specks of a few pixels"
    labels, n = ndimage.label(np.asarray(mask.convert("L")) > 127)
    y, x = np.nonzero(labels == 1 + np.argmax(np.bincount(labels.ravel())[1:]))
    return int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1


def cvc_procedures(folder, shared_data, length=5):
    """Each sequence a procedure 911-0SS with one polyp. The frames are chosen views and no neighbours in time, so a tracklet is `length` of them in a row;
    a number is left out after each, which ends it. Returns the folder"""
    data, folder = Path(shared_data)/"cvc-clinicdb", Path(folder)
    sequences = {}
    for image, sequence in json.loads((data/"frame_to_sequence.json").read_text()).items(): sequences.setdefault(int(sequence), []).append(int(image))
    for sequence, images in sorted(sequences.items()):
        name, numbers = f"911-{sequence:03d}", {i + i//length: image for i, image in enumerate(sorted(images))}
        write_realcolon(folder, name, {t: Image.open(data/"images"/f"{i}.png").convert("RGB") for t, i in numbers.items()},
                        [(t, f"{name}_1", *largest_blob(Image.open(data/"masks"/f"{i}.png"))) for t, i in numbers.items()], quality=95)
    return folder


def cvc_tracklets(source, length=5):
    "Tracklets of exactly `length` frames; the views of a sequence may lie far apart, so the boxes need not overlap"
    from freerep.tracklets import annotated_tracklets
    return annotated_tracklets(source, stride=1, min_frames=length, iou=0)
