"""Writes the Python code of the protocols: ``python protos/generate.py``.

The result is committed and never edited by hand; a test compares it. Needs
grpcio-tools and mypy-protobuf of the versions in pyproject.toml: newer ones write code
that refuses the protobuf runtime of our users.
"""

import argparse
import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
TARGETS = {
    "jgraph": PROTOS.parent / "jgraph" / "rpc" / "_pb",
    "inference": PROTOS.parent / "jgraph" / "serving" / "_pb",
}
"""Where the code of each protocol is."""


def generate(protocol: str, target: Path) -> None:
    """Writes the code of a protocol and its type stub into ``target``.

    Args:
      protocol: name of its file.
      target: an existing directory.

    Raises:
      RuntimeError: protoc failed; it says why on stderr.
    """
    from grpc_tools import protoc

    plugin = Path(sys.executable).with_name("protoc-gen-mypy")
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"{protocol}.proto",
    ]
    code = protoc.main(arguments)
    if code:
        raise RuntimeError(f"protoc ended with {code}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="directory for all of it")
    into = parser.parse_args().into
    for protocol, target in TARGETS.items():
        generate(protocol, into or target)
