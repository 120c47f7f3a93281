"""The packages, which pyproject.toml could only list one by one: those of mla_fx/, and two folders beside it."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mla_fx", "mla_fx.*"]), "mla_fx.patterns", "mla_fx.lowering"])
