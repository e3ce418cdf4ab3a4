"""Wheels with compiled kernels, from the wheel without them: python .ci/wheels.py dist/smartprune-*-none-any.whl

gcc compiles, or its cross-compiler for ARM, so the code is what it compiles on a machine of its own. zig links against an old
version of glibc, so that the libraries run on all Linux systems of manylinux_2_17. zig does both for macOS and Windows, whose
libraries do not run here. A library is named after a hash of its sources and flags: a wheel whose sources changed later does not
load it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from smartprune.runtime import DTYPES
from smartprune.runtime.cpu.build import PREBUILT, SOURCES, Unit, flags_of, libraries_of, library_name, probe_of, stem_of, units_of
from smartprune.runtime.cpu.instruction_sets import ARCHITECTURES, INSTRUCTION_SETS

ZIG = (sys.executable, "-m", "ziglang", "cc")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Target:
    """A kind of machine that wheels are built for."""

    tag: str  # of the wheel
    system: str  # sys.platform
    machine: str  # platform.machine()
    zig: str  # zig's name of the target
    compiler: tuple[str, ...]

    def spelled(self, flag: str) -> str:
        """A flag as the compiler of the target takes it: zig has its own names of processors, and macOS runs on one kind."""
        return flag.replace("-march=armv8.2-a", "-mcpu=apple_m1").replace("+fp16", "+fullfp16") if self.system == "darwin" else flag

    @property
    def link(self) -> tuple[str, ...]:
        return (*ZIG, "-target", self.zig, "-shared")


TARGETS = (
    Target("manylinux_2_17_x86_64.manylinux2014_x86_64", "linux", "x86_64", "x86_64-linux-gnu.2.17", ("gcc",)),
    Target(
        "manylinux_2_17_aarch64.manylinux2014_aarch64",
        "linux",
        "aarch64",
        "aarch64-linux-gnu.2.17",
        ("aarch64-linux-gnu-gcc", "-mno-outline-atomics"),
    ),
    Target("macosx_11_0_arm64", "darwin", "arm64", "aarch64-macos.11.0", (*ZIG, "-target", "aarch64-macos.11.0")),
    Target("win_amd64", "win32", "AMD64", "x86_64-windows-gnu", (*ZIG, "-target", "x86_64-windows-gnu")),
)


def libraries(target: Target) -> dict[str, list[Unit]]:
    """What the kernels of a machine consist of, by the names of the files."""
    machine = ARCHITECTURES.get(target.machine, target.machine)
    rows = tuple(row for row in INSTRUCTION_SETS if row.architecture in (None, machine))
    named = {"probe": [probe_of(rows)]}
    named |= {library_name(row, dtype): units_of(row, dtype) for row in rows for dtype in DTYPES}
    return {f"{stem_of(name, units, target.system, target.machine)}.so": units for name, units in named.items()}


def compiled(target: Target, folder: Path) -> list[Path]:
    """Compiles the libraries of a machine."""
    objects: dict[str, Path] = {}
    out = []
    for file, units in libraries(target).items():
        for unit in units:
            key = unit.key(target.system, target.machine)
            if key not in objects:
                objects[key] = folder / f"{key}.o"
                source = str(SOURCES / unit.source)
                run(
                    *target.compiler,
                    *flags_of(target.system),
                    *map(target.spelled, unit.flags),
                    "-c",
                    source,
                    "-o",
                    str(objects[key]),
                )
        path = folder / file
        run(
            *target.link,
            "-o",
            str(path),
            *(str(objects[unit.key(target.system, target.machine)]) for unit in units),
            *libraries_of(target.system),
        )
        out.append(path)
    return out


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr}")


def write_wheel(plain: Path, target: Target, files: list[Path], folder: Path) -> Path:
    """A copy of a wheel with more files, for one kind of machine."""
    name = plain.name.replace("-none-any.whl", f"-none-{target.tag}.whl")
    inside = PREBUILT.relative_to(ROOT / "src").as_posix()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        contents = {item.filename: source.read(item) for item in source.infolist()}
        record = next(entry for entry in contents if entry.endswith(".dist-info/RECORD"))
        tags = "".join(f"Tag: py3-none-{tag}\n" for tag in target.tag.split("."))
        info = record.replace("RECORD", "WHEEL")
        text = contents[info].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        contents[info] = text.replace("Tag: py3-none-any\n", tags).encode()
        contents |= {f"{inside}/{file.name}": file.read_bytes() for file in files}
        rows = [f"{entry},{digest(data)},{len(data)}" for entry, data in contents.items() if entry != record]
        contents[record] = ("\n".join([*rows, f"{record},,"]) + "\n").encode()
        for entry, data in contents.items():
            wheel.writestr(zipfile.ZipInfo(entry, (2020, 2, 2, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return folder / name


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel without compiled kernels")
    plain = parser.parse_args().wheel
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as temporary:
            files = compiled(target, Path(temporary))
            path = write_wheel(plain, target, files, plain.parent)
        print(f"{path}: {path.stat().st_size:,} bytes, {len(files)} libraries")


if __name__ == "__main__":
    main()
