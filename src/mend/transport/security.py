"""Derives the keys of a job from its secret, and seals data with them. Opens no socket.

All keys of a process follow from one secret that the members of a job share:

    secret --HKDF--> server key pair of every sideband           one for all, pinned by clients
                     client key pair of each process             of (rack, rank), or of tools
                     lane secret --HKDF--> two keys per connection, with fresh random of both sides

A secret proves membership, not identity: its owner can derive the keys of all members.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from mend.errors import ConfigError, TransportError, ensure
from mend.types import PERSON as PERSON_RACK
from mend.types import RACKS_MAX, READER_RACK, WITNESS, Peer

SECRET_BYTES = 32
SECRETS_MAX = 4
"""Secrets that a process accepts at once: the newest, and those that are being replaced."""

PERSON = Peer(PERSON_RACK, 0)
"""The peer number of tools: `mend top`, `mend doctor`, `mend retire`, a launcher."""

READER = Peer(READER_RACK, 0)
"""The peer number of clients with a reader's key. They get answers; anything else that they send
is ignored."""

READER_BYTES = 2 * SECRET_BYTES
"""Size of a reader's key: a secret derived from the job's, and the public key of its sidebands."""

RANDOM_BYTES = 32
TAG_BYTES = 16
NAME_BYTES = 8
_KEY_BYTES = 32
_NONCE_BYTES = 12


class BadSeal(TransportError):
    """The bytes were not sealed by a member of the job for this place of this connection."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CurveZMQ key pair in the encoding of libzmq."""

    public: bytes
    secret: bytes


class Secret:
    """One secret of a job and the keys derived from it. `conceal`: whether payloads of the lane are
    encrypted, and not only authenticated."""

    def __init__(self, secret: bytes, *, conceal: bool = True) -> None:
        if len(secret) != SECRET_BYTES:
            rule, remedy = f"must be {SECRET_BYTES} bytes", "Make one with `mend keys new FILE`."
            raise ConfigError("secret", f"<{len(secret)} bytes>", rule, remedy)
        self._secret, self.conceal = secret, conceal
        self.name = self._derive(b"name", NAME_BYTES)
        """Names the secret of a lane connection without revealing it."""
        self._lane = self._derive(b"lane")

    def _derive(self, purpose: bytes, length: int = _KEY_BYTES) -> bytes:
        info = b"mend 1 " + purpose
        return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(self._secret)

    def _pair(self, purpose: bytes) -> CurveKeys:
        secret = z85.encode(self._derive(purpose))
        return CurveKeys(zmq.curve_public(secret), secret)

    def server(self) -> CurveKeys:
        """The key pair of every sideband of the job."""
        return self._pair(b"sideband server")

    def client(self, peer: Peer) -> CurveKeys:
        """The key pair of one process as a client."""
        return self._pair(b"sideband client " + peer.rack.to_bytes(2) + peer.rank.to_bytes(2))

    def reader(self) -> Secret:
        """The secret of readers, who may read the merged model and nothing else. The job's secret
        cannot be derived from it."""
        return Secret(self._derive(b"reader"), conceal=self.conceal)

    def reader_key(self) -> bytes:
        """The key that a reader is given."""
        return self._derive(b"reader") + z85.decode(self.server().public)

    def lane(self, job: bytes, reader: bytes, holder: bytes) -> tuple[Channel, Channel]:
        """The channels (requests, replies) of one connection. `job`: the lane's token. `reader`,
        `holder`: random bytes that each end has drawn for this connection."""
        ensure(len(reader) == len(holder) == RANDOM_BYTES, "not the random bytes of two ends")
        purpose = b"mend 1 lane connection " if self.conceal else b"mend 1 lane open connection "
        made = HKDF(
            algorithm=SHA256(), length=2 * _KEY_BYTES, salt=reader + holder, info=purpose + job
        )
        keys = made.derive(self._lane)
        return Channel(keys[:_KEY_BYTES]), Channel(keys[_KEY_BYTES:])


class Secrets:
    """The secrets that a process accepts. The first is the one that it uses; the others are being
    replaced, or are about to replace it. `me`: the process; `conceal`: as in Secret."""

    def __init__(
        self, secrets: Iterable[bytes], me: Peer = PERSON, *, conceal: bool = True
    ) -> None:
        self.all = tuple(Secret(secret, conceal=conceal) for secret in secrets)
        if not 0 < len(self.all) <= SECRETS_MAX:
            rule = f"needs 1 to {SECRETS_MAX} secrets"
            raise ConfigError("secrets", len(self.all), rule, "Keep the newest two.")
        self.me = me
        self._readers = tuple(secret.reader() for secret in self.all)

    @property
    def own(self) -> Secret:
        return self.all[0]

    def named(self, name: bytes) -> Secret | None:
        """The secret with this name."""
        return _named(self.all, name)

    def reading(self, name: bytes) -> Secret | None:
        """The secret of a reader with this name."""
        return _named(self._readers, name)

    def guests(self, ranks: int) -> dict[bytes, Peer]:
        """Public key -> peer, for all clients that may connect to this process's sideband. A leader
        and the witness accept the leaders of all racks, the witness, tools and readers. A leader
        also accepts its own ranks. Any other rank accepts only its leader."""
        rack, rank = self.me
        if rank != 0:
            peers = [Peer(rack, 0)]
        else:
            peers = [Peer(other, 0) for other in range(RACKS_MAX)] + [Peer(WITNESS, 0), PERSON]
            peers += [Peer(rack, own) for own in range(1, ranks)]
        found = {secret.client(peer).public: peer for secret in self.all for peer in peers}
        if rank == 0:
            found |= {secret.client(READER).public: READER for secret in self._readers}
        return found


def _named(secrets: Iterable[Secret], name: bytes) -> Secret | None:
    match = None
    for secret in secrets:
        if hmac.compare_digest(secret.name, name):
            match = secret
    return match


def ways_of(keys: Iterable[bytes]) -> list[tuple[CurveKeys, CurveKeys]]:
    """For each key of a client, its own key pair and that of the sidebands, of which a reader knows
    only the public key. `keys`: of the job, or of readers."""
    found = []
    for key in keys:
        if len(key) == READER_BYTES:
            server = CurveKeys(z85.encode(key[SECRET_BYTES:]), b"")
            found.append((Secret(key[:SECRET_BYTES]).client(READER), server))
        else:
            found.append((Secret(key).client(PERSON), Secret(key).server()))
    return found


def lane_secret_of(key: bytes, *, conceal: bool) -> Secret:
    """The secret that the owner of a key reads from lanes with."""
    return Secret(key[:SECRET_BYTES], conceal=conceal)


class Channel:
    """One direction of one lane connection. Both ends count the pieces, so a piece that is
    repeated, left out, moved or from another connection does not open.

    AES-256-GCM. The nonce is the count, and no key is used for two connections or directions.
    """

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._count = 0

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE_BYTES)

    def seal(self, plain: bytes | memoryview, about: bytes | memoryview, into: memoryview) -> None:
        """Seal `plain` into `into`, which is TAG_BYTES longer. `about` is authenticated, not
        sent."""
        self._aead.encrypt_into(self._nonce(), plain, about, into)

    def open(self, sealed: memoryview, about: bytes | memoryview, into: memoryview) -> None:
        """Open `sealed` into `into`. Raises BadSeal; then `into` is invalid, and the caller must
        close the connection."""
        try:
            self._aead.decrypt_into(self._nonce(), sealed, about, into)
        except InvalidTag:
            raise BadSeal("a piece that no member has sealed for this place") from None
