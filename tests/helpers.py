"""What several test files make: data sets in the layouts that freerep reads."""
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image


def scene(t=0, size=(96, 64), seed=0):
    "A smooth picture that changes with t, (h, w, 3) uint8"
    (w, h), r = size, np.random.default_rng(seed)
    y, x = np.mgrid[:h, :w]
    a, b, c = r.uniform(.03, .12, 3)
    return np.stack([128 + 100*np.sin(a*x + .1*t), 128 + 80*np.cos(b*y - .07*t), 100 + 60*np.sin(c*(x + y) + .05*t)], -1).astype(np.uint8)


def voc(size=None, objects=()):
    "A REAL-Colon XML: `size` (w, h) or None, `objects` of (unique_id, x0, y0, x1, y1)"
    head = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>" if size else ""
    body = "".join(f"<object><name>lesion</name><unique_id>{who}</unique_id><box_id>1</box_id><bndbox><xmin>{x0}</xmin><xmax>{x1}</xmax><ymin>{y0}</ymin><ymax>{y1}</ymax>"
                   "</bndbox></object>" for who, x0, y0, x1, y1 in objects)
    return f"<annotation><folder>frames</folder><filename>f.jpg</filename>{head}{body}</annotation>"


def write_realcolon(folder, name, images, boxes=(), fps=25, quality=90):
    """One video in the REAL-Colon layout: NAME_frames/, NAME_annotations/, and a row in video_info.csv and one per lesion in lesion_info.csv.

    `images`: {frame number: (h, w, 3) array} or a list; `boxes`: (frame, identity, x0, y0, x1, y1) each. Several calls fill one folder. Returns the folder."""
    folder, images = Path(folder), dict(images) if isinstance(images, dict) else dict(enumerate(images))
    for end in ("frames", "annotations"): (folder/f"{name}_{end}").mkdir(parents=True, exist_ok=True)
    by_frame = {}
    for t, *box in boxes: by_frame.setdefault(int(t), []).append(tuple(box))
    for t, image in images.items():
        Image.fromarray(np.asarray(image)).save(folder/f"{name}_frames/{name}_{t}.jpg", quality=quality)
        h, w = np.asarray(image).shape[:2]
        (folder/f"{name}_annotations/{name}_{t}.xml").write_text(voc((w, h), by_frame.get(t, ())))
    lesions = sorted({b[1] for b in boxes})
    _append(folder/"video_info.csv", "unique_video_name,age,sex,endoscope_brand,fps,num_frames,num_lesions,bbps", [f"{name},60,f,Olympus,{fps},{len(images)},{len(lesions)},8"])
    _append(folder/"lesion_info.csv", "unique_object_id,unique_video_name,size [mm],site,histology_extended,histology_class", [f"{x},{name},4,caecum,adenoma,AD" for x in lesions])
    return folder


def _append(path, head, rows):
    lines = path.read_text().splitlines() if path.exists() else [head]
    path.write_text("\n".join(lines + rows) + "\n")


def ldpolyp(shared_data):
    "(RGB frames {0-based number: array}, boxes (frame, identity, x0, y0, x1, y1)) of the real clip: 181 frames, one polyp in three runs"
    folder = shared_data/"ldpolypvideo"
    with av.open(str(folder/"video_101.mp4")) as c: images = {i: f.to_ndarray(format="rgb24") for i, f in enumerate(c.decode(video=0))}
    rows = np.loadtxt(folder/"video_101_boxes.csv", delimiter=",", skiprows=1)
    return images, [(int(r[0]) - 1, "101_1", *r[1:]) for r in rows]


def write_video(path, images, fps=25, pts=None, codec="libx264", **options):
    "Encode RGB images; `pts` in milliseconds gives a variable frame rate"
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=fps, options={k: str(v) for k, v in options.items()})
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if pts is not None: stream.codec_context.time_base = Fraction(1, 1000)
        for i, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = (i, Fraction(1, fps)) if pts is None else (int(pts[i]), Fraction(1, 1000))
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return Path(path)


def decode_all(path):
    "Every frame of a video file by plain sequential decoding"
    with av.open(str(path)) as c: return [f.to_ndarray(format="rgb24") for f in c.decode(video=0)]
