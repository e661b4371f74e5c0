"""Everything is read from settings.ini, the file that nbdev uses too."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="], interpolation=None)
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
extras = {name: cfg[f"{name}_requirements"].split() for name in ("dev", "lite", "segment", "foundation")}

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"],
    long_description=(here/"README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    author=cfg["author"], author_email=cfg["author_email"], url=cfg["git_url"], license="Apache-2.0",
    python_requires=f">={cfg['min_python']}", packages=find_packages(include=["freerep", "freerep.*"]),
    install_requires=cfg["requirements"].split(), extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    classifiers=["Intended Audience :: Science/Research", "Programming Language :: Python :: 3"],
    zip_safe=False,
)
