"""Real polyps through the whole of evaluation. An encoder that has learnt nothing: this tests the plumbing, not the method."""
import json

import numpy as np
import pytest
from PIL import Image

from freerep.core import write_json
from freerep.evaluation import evaluate, evaluate_path, evaluate_source, metrics_table
from freerep.index import Index, embed, embed_pixels
from freerep.pretraining import PretrainConfig, pretrain
from freerep.sources import open_source
from freerep.tracklets import info, tracklet_frames
from helpers_cvc import cvc_procedures, cvc_tracklets


@pytest.fixture(scope="module")
def source(tmp_path_factory, shared_data):
    return open_source(cvc_procedures(tmp_path_factory.mktemp("cvc")/"procedures", shared_data))


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    return pretrain(source, PretrainConfig("tiny", epochs=0, length=4, stride=1), out=tmp_path_factory.mktemp("cvc")/"untrained")


def test_the_data_set_is_what_it_should_be(source, shared_data):
    facts = info(source)
    assert (facts["kind"], facts["n_videos"], facts["n_frames"], facts["n_polyps"], facts["n_boxes"]) == ("realcolon", 13, 286, 13, 286)
    sequence = {int(k): v for k, v in json.loads((shared_data/"cvc-clinicdb"/"frame_to_sequence.json").read_text()).items()}
    first = min(i for i, s in sequence.items() if s == 7)
    mask = np.asarray(Image.open(shared_data/"cvc-clinicdb"/"masks"/f"{first}.png").convert("L")) > 127
    box = source["911-007"].annotations.iloc[0]
    assert mask[int(box.y0):int(box.y1), int(box.x0):int(box.x1)].sum() == mask.sum() and box.frame == 0
    pixels = np.asarray(Image.open(shared_data/"cvc-clinicdb"/"images"/f"{first}.png").convert("RGB")).astype(int)
    assert np.abs(source["911-007"].read([0])[0].astype(int) - pixels).mean() < 4       # written as JPEG


def test_evaluate_on_real_polyps(source, run, tmp_path):
    table = cvc_tracklets(source)
    assert len(table) == 55 and {len(tracklet_frames(r)) for r in table.itertuples()} == {5}
    index = embed(source, run, boxes=True, table=table)
    m = evaluate(index)
    assert (m["n_tracklets"], m["n_polyps"], m["n_videos"]) == (55, 13, 13)
    assert (m["retrieval"]["queries"], m["retrieval"]["skipped"]) == (54, 1)            # one sequence has six frames
    assert m["retrieval"]["within_video_mAP"] is None                                  # every procedure shows one polyp
    assert m["few_shot"]["skipped"]["5"] == 13 and m["few_shot"]["5"] is None
    chance = evaluate(Index(index.embeddings, table.assign(identity=np.random.default_rng(0).permutation(table.identity))))
    for part, key in (("retrieval", "mAP"), ("reid", "AUROC")): assert 1 > m[part][key] > chance[part][key] + .1
    index.save(tmp_path/"index")
    write_json(m, tmp_path/"m.json")
    assert evaluate_path(tmp_path/"index")["retrieval"] == m["retrieval"] == json.loads((tmp_path/"m.json").read_text())["retrieval"]


def test_views_and_baselines_on_real_polyps(source, run):
    table = cvc_tracklets(source)
    rows = {"5 times": evaluate_source(source, run, table=table), "masked": evaluate_source(source, run, table=table, mask_polyp=True),
            "1.3 times": evaluate_source(source, run, table=table, crop_scale=1.3), "colour": evaluate(embed_pixels(source, "mean_colour", table=table))}
    shown = metrics_table(rows)
    assert shown[["mAP", "HR@1", "AUROC", "K=1", "K=3"]].notna().all(axis=None) and (shown["mAP"].nunique() == 4)
