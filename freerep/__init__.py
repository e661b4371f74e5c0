__version__ = "0.1.0"

from importlib import import_module as _import

# `from freerep import *` gives the names of these modules, and none is imported before one of its names is used
_modules = ("core", "synth", "sources", "tracklets", "views", "bags", "encoder", "losses", "learner", "pretraining",
            "metrics", "index", "evaluation", "report", "search", "phantom", "examples", "time_contrast", "context",
            "segmenter", "bank", "image_segmentation", "video_segmentation", "finetuning", "segmentation_metrics", "explore", "phantom_demo",
            "demo", "studies")

def __getattr__(name):
    if name == "__all__": return [n for m in _modules for n in _import(f"freerep.{m}").__all__]
    if name in _modules: return _import(f"freerep.{name}")
    if name.startswith("_"): raise AttributeError(name)
    for m in _modules:
        module = _import(f"freerep.{m}")
        if name in module.__all__: return getattr(module, name)
    raise AttributeError(f"module 'freerep' has no attribute {name!r}")
