"""Masks of secure sums: key agreement, streams of random words, sealed shares.

X25519 agrees on a secret of two members, HKDF-SHA256 makes a key of it for one purpose,
round and pair, AES-256-CTR makes a stream of words of that, and AES-256-GCM seals what
passes through who sums. Each key serves once, so no nonce is needed.
"""

import hashlib
from typing import Any, Final, final

import numpy as np

KEY_BYTES: Final = 32
_NONCE: Final = bytes(12)
_COUNTER: Final = bytes(16)
_ZEROS: Final = memoryview(bytes(1 << 17))


@final
class KeyPair:
    """A key pair of X25519.

    Args:
      private: 32 random bytes.

    Example:
      >>> one, two = KeyPair(bytes([1] * 32)), KeyPair(bytes([2] * 32))
      >>> one.agreed(two.public) == two.agreed(one.public)
      True
    """

    def __init__(self, private: bytes) -> None:
        # Only when it is needed: most clusters make no secure sums.
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes_raw()

    def agreed(self, public: bytes) -> bytes:
        """Returns the secret of this pair and of who has the other key.

        Raises:
          ValueError: it is a key with which everybody agrees on the same.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        return self._key.exchange(X25519PublicKey.from_public_bytes(public))


def derived(secret: bytes, *purpose: object) -> bytes:
    """Returns a key of 32 bytes for one purpose, by HKDF-SHA256.

    Args:
      secret: of 32 bytes.
      *purpose: what tells keys of one secret apart; each is written with its length, so
        that no two lists of them are written alike.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    texts = [str(part).encode() for part in ("jgraph secure sum", *purpose)]
    info = b"".join(len(text).to_bytes(4, "big") + text for text in texts)
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def add_words(values: Any, key: bytes, *, takes_away: bool = False) -> None:
    """Adds random words to values, or takes them away, in place and modulo 2^32.

    Args:
      values: uint32[n].
      key: makes the words, n of them; it serves for these only.
      takes_away: undoes it.

    Example:
      >>> values = np.zeros(2, np.uint32)
      >>> add_words(values, bytes(32))
      >>> values.tolist()
      [2025887196, 2307473570]
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(_COUNTER)).encryptor()
    change = np.subtract if takes_away else np.add
    # A piece at a time, so that the words stay in the cache.
    piece = np.empty(len(_ZEROS) + len(_COUNTER), np.uint8)
    words = piece[: len(_ZEROS)].view("<u4")
    for first in range(0, values.size, words.size):
        some = values[first : first + words.size]
        stream.update_into(_ZEROS[: 4 * some.size], piece.data)
        change(some, words[: some.size], out=some)


def seal(key: bytes, plain: bytes) -> bytes:
    """Returns sealed bytes; the key serves for these only."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(_NONCE, plain, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Returns what was sealed; None: it is not that."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        return None


def digest(seed: bytes) -> bytes:
    """Returns by what a seed is known again, and which tells nothing of it."""
    return hashlib.sha256(b"jgraph secure sum seed" + seed).digest()
