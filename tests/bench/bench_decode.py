"""How many frames a second does a core read, as training does? python tests/bench/bench_decode.py [N]

JPEG frames of 1352x1080, the crops of the paper (area 0.08-1, ratio 3/4-4/3) at 232 pixels, one thread. Plain is what most loaders do: decode the
whole frame, cut, resize. Draft is `Video.read`: the decoder reduces the frame as far as the crop allows."""
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from freerep.sources import ImageVideo, _shrink

W, H, SIZE = 1352, 1080, 232


def write_frames(folder, n, seed=0):
    "Frames with texture, so that a file has about the size of a real one"
    r = np.random.default_rng(seed)
    y, x = np.mgrid[:H, :W]
    light = np.exp(-((x - W/2)**2 + (y - H/2)**2)/(.5*W)**2)[..., None]
    for i in range(n):
        fine = np.asarray(Image.fromarray(r.integers(0, 256, (H//3, W//3), dtype=np.uint8)).resize((W, H), Image.Resampling.BICUBIC), float)[..., None]
        image = light*[230, 150, 120] + .22*(fine - 128) + 20
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder/f"{i}.jpg", quality=88)


def crops(n, seed=1):
    "(n, 4) boxes of random resized crops"
    r, out = np.random.default_rng(seed), []
    while len(out) < n:
        area, ratio = W*H*r.uniform(.08, 1), np.exp(r.uniform(np.log(3/4), np.log(4/3)))
        w, h = round(np.sqrt(area*ratio)), round(np.sqrt(area/ratio))
        if w <= W and h <= H: x, y = r.integers(0, W - w + 1), r.integers(0, H - h + 1); out.append((x, y, x + w, y + h))
    return np.array(out)


def plain(video, f, box):
    with Image.open(video.file(f)) as im: return np.asarray(im.convert("RGB").crop(tuple(map(int, box))).resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def main(n=60):
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        write_frames(folder, n)
        video, boxes, rate = ImageVideo("bench", folder), crops(n), {}
        video.size, video.frames
        kb = sum(p.stat().st_size for p in folder.iterdir())/n/1e3
        for name, read in (("plain", lambda f, b: plain(video, f, b)), ("draft", lambda f, b: video.read([f], box=b, size=SIZE)[0])):
            for f in range(3): read(f, boxes[f])
            start = time.process_time()
            for f in range(n): read(f, boxes[f])
            rate[name] = n/(time.process_time() - start)
        factors = Counter(next(s for s in (8, 4, 2, 1) if s <= _shrink(b[None], (SIZE, SIZE))) for b in boxes)
        difference = np.mean([np.abs(plain(video, f, boxes[f]).astype(int) - video.read([f], box=boxes[f], size=SIZE)[0]).mean() for f in range(10)])
    print(f"{W}x{H}, {kb:.0f} KB a frame; decoded at 1/{{{', '.join(f'{s}: {100*c/n:.0f} %' for s, c in sorted(factors.items()))}}}; mean difference {difference:.2f} grey levels")
    print(f"plain {rate['plain']:.0f} frames/s, draft {rate['draft']:.0f} frames/s, ratio {rate['draft']/rate['plain']:.2f}")


if __name__ == "__main__": main(*map(int, sys.argv[1:]))
