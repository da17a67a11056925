"""Bearer token: the secret that members and clients of a cluster share.

It is in a file that only its owner may read, and travels as metadata of each stream and
call, once. It is never on a command line, in an environment variable, or in a log.
Imports no gRPC.
"""

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final, TypeAlias, final

from jgraph.errors import TokenError

TOKEN_FILE: Final = "JGRAPH_TOKEN_FILE"
"""Environment variable that names the file of the token."""
NAME: Final = "token"
SERVE_NAME: Final = "serve_token"
"""What callers of a model server show; it is not that of a cluster."""
METADATA_KEY: Final = "authorization"
Metadata: TypeAlias = tuple[tuple[str, str], ...]
_LONG_ENOUGH: Final = re.compile(r"[0-9A-Za-z_.~+/=-]{32,512}")


@final
@dataclass(frozen=True, slots=True, repr=False)
class Token:
    """A secret, and the file that it is in.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     token = Token.make(Path(directory) / "token")
      ...     token == Token.read(token.path), len(token.value)
      (True, 64)
    """

    value: str
    path: Path

    @classmethod
    def read(cls, path: Path) -> "Token":
        """Reads a token.

        Raises:
          TokenError: there is none, or others may read it too.
        """
        try:
            status = path.stat()
            value = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise TokenError(
                f"cannot read the token {path}: {why}; copy the file from the host "
                f"where the cluster was made, and name it with {TOKEN_FILE}",
                path=str(path),
            ) from error
        # A file of another owner, as secrets of Kubernetes are, is not ours to protect.
        own = os.name == "posix" and status.st_uid == os.getuid()
        if own and status.st_mode & 0o077:
            raise TokenError(
                f"others may read the token {path}; write chmod 600 {path}",
                path=str(path),
            )
        if not _LONG_ENOUGH.fullmatch(value):
            raise TokenError(
                f"{path} holds no token; make one with "
                f"`jgraph token new {quote(str(path))}`",
                path=str(path),
            )
        return cls(value, path)

    @classmethod
    def make(cls, path: Path, *, replace: bool = False) -> "Token":
        """Makes a token of 32 random bytes, or reads the one that is there.

        Args:
          path: the file.
          replace: make a new one in any case.

        Raises:
          TokenError: the file cannot be made.
        """
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(new, flags, 0o600), "w", encoding="ascii") as file:
                file.write(f"{secrets.token_hex(32)}\n")
            if replace:
                new.replace(path)
            else:
                _put(new, path)
        except OSError as error:
            raise TokenError(
                f"cannot make the token {path}: {error.strerror or error}; name a file "
                f"that can be made with {TOKEN_FILE}, or a home with JGRAPH_HOME",
                path=str(path),
            ) from error
        return cls.read(path)

    @property
    def metadata(self) -> Metadata:
        """What a caller sends, once per stream or call."""
        return ((METADATA_KEY, f"Bearer {self.value}"),)

    def __repr__(self) -> str:
        return f"Token({str(self.path)!r})"


def _put(new: Path, path: Path) -> None:
    """Moves a file to its place, unless there is one: of two, the first stays."""
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()


def home() -> Path:
    """Returns the user's own directory of jgraph: ``~/.jgraph``, or ``JGRAPH_HOME``."""
    return Path(os.environ.get("JGRAPH_HOME", "~/.jgraph")).expanduser()


def own_path() -> Path:
    """Returns the file of this user's token, which may not be there."""
    return Path(os.environ.get(TOKEN_FILE) or home() / NAME).expanduser()


def has_token(certificates: Path | None = None) -> bool:
    """Whether there is a token to use without making one; see ``find_token``."""
    places = [home() / NAME, *([certificates / NAME] if certificates else [])]
    return bool(os.environ.get(TOKEN_FILE)) or any(map(Path.exists, places))


def find_token(
    source: str | os.PathLike[str] | None = None, certificates: Path | None = None
) -> Token:
    """Returns the token to use.

    The file is the first of: ``source``; what the environment variable
    ``JGRAPH_TOKEN_FILE`` names; ``token`` beside the certificates; the user's own,
    ``~/.jgraph/token``, which is made when it is first asked for.

    Raises:
      TokenError: the file cannot be read or made.
    """
    if named := source or os.environ.get(TOKEN_FILE):
        return Token.read(Path(named).expanduser())
    if certificates is not None and (certificates / NAME).exists():
        return Token.read(certificates / NAME)
    return Token.make(home() / NAME)
