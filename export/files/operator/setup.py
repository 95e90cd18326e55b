"""Build in place, `python setup.py build_ext --inplace`, or a wheel: what has changed alone."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from compiling import MANIFEST, link_development, link_operator  # noqa: E402

NAME = MANIFEST["name"]
EXTENSIONS = [Extension(f"{NAME}._C", ["csrc/operator.cpp"])]
if (ROOT / "csrc" / "pybind.cpp").exists():
    EXTENSIONS.append(Extension(f"{NAME}.development", ["csrc/pybind.cpp"]))


class AnyPythonWheel(bdist_wheel):
    """A wheel for any Python: nothing in it is built against one."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Build(build_ext):
    """Links extensions as `compiling` does."""

    def build_extension(self, ext: Extension) -> None:
        made, folder = Path(self.get_ext_fullpath(ext.name)).resolve(), Path(self.build_temp)
        if ext.name.endswith("._C"):
            link_operator("csrc/operator.cpp", made, folder.resolve())
        else:
            link_development(made, folder.resolve())

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


setup(
    name=NAME,
    version=MANIFEST["version"],
    packages=[NAME],
    package_data={NAME: ["*.json", "samples/*.bin"]},
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": Build, "bdist_wheel": AnyPythonWheel},
)
