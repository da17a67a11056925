"""Labels of a model's versions: ``labels.json``, replaced by rename."""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from jgraph.errors import ArtifactError
from jgraph.serving.artifact import MAX_VERSION, opened, read_file, versions_in

FILE: Final = "labels.json"
MAX_BYTES: Final = 1 << 20
LABEL: Final = re.compile(r"[A-Za-z_][0-9A-Za-z_.-]{0,63}")
_SPLIT: Final = "split"
_MIRROR: Final = "mirror"


@final
@dataclass(frozen=True, slots=True)
class Labels:
    """What the versions of a model are called, and how requests are split.

    Attributes:
      targets: version by label.
      split: percent of the requests by label, for requests that name no version.
      mirror: label of the version that gets a copy of each request; empty: none does.

    Example:
      >>> Labels.of('{"stable": 7, "canary": 8, "mirror": "canary"}')
      Labels(targets={'stable': 7, 'canary': 8}, split={}, mirror='canary')
    """

    targets: Mapping[str, int] = field(default_factory=dict)
    split: Mapping[str, int] = field(default_factory=dict)
    mirror: str = ""

    @classmethod
    def of(cls, text: str) -> "Labels":
        """Reads the content of the file.

        Raises:
          ValueError: it means nothing; says why.
        """
        found: Any = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no object of labels")  # noqa: TRY004  # of a file
        split, mirror = found.pop(_SPLIT, {}), found.pop(_MIRROR, "")
        for label, version in found.items():
            if not _is_label(label):
                raise ValueError(_no_label(label))
            if type(version) is not int or not 0 < version <= MAX_VERSION:
                raise ValueError(f"the version of '{label}' is no number from 1 on")
        if not isinstance(split, dict) or any(
            type(share) is not int or share < 0 or label not in found
            for label, share in split.items()
        ):
            raise ValueError("split has to give labels of this file percents")
        if split and sum(split.values()) != 100:
            raise ValueError(f"the percents of split make {sum(split.values())}")
        if mirror != "" and (not isinstance(mirror, str) or mirror not in found):
            raise ValueError("mirror has to be a label of this file")
        return cls(found, split, mirror)


def _is_label(name: object) -> bool:
    is_word = isinstance(name, str) and LABEL.fullmatch(name) is not None
    return is_word and name not in (_SPLIT, _MIRROR)


def _no_label(name: object) -> str:
    return (
        f"'{name!s:.80}' is no label: take letters, digits, '_', '-' and '.', a letter "
        f"first, and neither '{_SPLIT}' nor '{_MIRROR}'"
    )


def check_label(model: Path, label: str | None) -> None:
    """Refuses a label before there is the version that is to have it.

    Args:
      model: directory of the model.
      label: the name; None: there is to be none.

    Raises:
      ArtifactError: it is none, or the file of labels means nothing.
    """
    if label is None:
        return
    if not _is_label(label):
        raise ArtifactError(_no_label(label))
    read_labels(model)


def read_labels(model: Path) -> Labels:
    """Reads the labels of a model; a model without the file has none.

    Raises:
      ArtifactError: the file means nothing.
    """
    try:
        return Labels.of(read_file(model, FILE, MAX_BYTES).decode())
    except FileNotFoundError:
        return Labels()
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{model / FILE}: {error}; correct it") from error


def set_label(model: Path, label: str, version: int | None) -> Labels:
    """Calls a version by a label, or takes the label away; returns all labels.

    Args:
      model: directory of the model.
      label: the name.
      version: what it is to name; None: nothing any more.

    Raises:
      ArtifactError: no such version, no label, or the file cannot be written.
    """
    with one_at_a_time(model):
        return _write_label(model, label, version)


@contextmanager
def one_at_a_time(model: Path) -> Iterator[None]:
    """Waits for others who set labels of a model by what there was, or prune it.

    They hold it for as long as it takes to write a small file, or to rename versions.
    Where the directory cannot be locked, whoever writes there says what is wrong.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            fcntl.flock(stack.enter_context(opened(model)), fcntl.LOCK_EX)
        yield


def _write_label(model: Path, label: str, version: int | None) -> Labels:
    if not _is_label(label):
        raise ArtifactError(_no_label(label))
    now = read_labels(model)
    targets = {name: v for name, v in now.targets.items() if name != label}
    if version is not None:
        if version not in (there := versions_in(model)):
            raise ArtifactError(
                f"{model.name} has no version {version}; it has "
                f"{', '.join(map(str, there)) or 'none'}"
            )
        targets[label] = version
    if targets == now.targets:
        return now
    more = {_SPLIT: now.split, _MIRROR: now.mirror}
    content = json.dumps(
        {**targets, **{name: one for name, one in more.items() if one}}
    )
    try:
        labels = Labels.of(content)
    except ValueError as error:
        raise ArtifactError(f"{error}") from error
    new = model / f".{FILE}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        new.write_text(content, encoding="utf-8")
        new.replace(model / FILE)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ArtifactError(
            f"cannot write {model / FILE}: {error.strerror or error}"
        ) from error
    return labels
