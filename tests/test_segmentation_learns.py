"The segmenter of the demo, trained in full on phantoms of a seed that no figure is quoted of: about four minutes, the longest test"
from importlib.util import find_spec

import pytest

from freerep.phantom_demo import segmentation_demo

pytestmark = pytest.mark.skipif(find_spec("sam2") is None, reason="the package sam2 is not installed")


def test_held_out_slices_are_segmented_from_their_context(tmp_path):
    "Masks are read and not known by heart, similar context is worth at least as much as any, and lower confidence goes with lower Dice"
    metrics = segmentation_demo(tmp_path/"demo", seed=103)
    dice = {row: found["dice"] for row, found in metrics["segmentation"].items() if row != "per_class"}
    assert dice["after"] >= .6
    assert dice["after"] >= .25 + max(dice["before"], dice["wrong_context"])
    assert dice["after"] >= max(dice["random_context"], dice["copied"])
    assert dice["followed"] >= .6
    assert metrics["confidence_correlation"] > .3
