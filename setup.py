"""The packages, which pyproject.toml could only list one by one: those of mla_fx/, and two folders beside it."""

from setuptools import find_packages, setup

FOLDERS = ["patterns", "patterns.*", "lowering", "lowering.*"]
PLUGINS = [f"mla_fx.{package}" for package in find_packages(include=FOLDERS)]

setup(packages=[*find_packages(include=["mla_fx", "mla_fx.*"]), *PLUGINS])
