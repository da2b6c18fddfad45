"""Heartbeat: a rank's side of its companion: starts it, and learns from it which ranks are lost.

Companions of other hosts reach this one's at the address that `choose` returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ... import settings
from .companion import Setting, write_note
from .watch import Peer
from .watchdog import command_of

# `collectives` needs NumPy; `gtopk doctor` chooses an address where NumPy is broken, too.
if TYPE_CHECKING:
    from collectives.transports import Transport

_LEAVE_SECONDS: Final = 2.0  # for a companion to announce the departure
_POLL_SECONDS: Final = 0.01
_STARTS: Final = 3  # how often a companion is started, as one that was killed is replaced

_GET_ADDRESS: Final = 0x8915  # Linux: SIOCGIFADDR
_NAME_BYTES: Final = 15

# The variables that name a job's network interface: gtopk's first, then those of the transports.
OURS: Final = settings.INTERFACE.name
THEIRS: Final = ("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME")

# Nothing is sent there: connecting a UDP socket to it shows which own address the system uses.
_ANYWHERE: Final = "192.0.2.1"  # RFC 5737


class Choice(NamedTuple):
    """An IPv4 address of this host, "" where there is none, and a text that says what chose it."""

    address: str
    by: str


def own_address(one_host: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address that the other ranks reach this one at; "" where there is none.

    one_host: whether all ranks are on this host; then it is one that other hosts cannot reach.
    Raises ValueError for an interface that GTOPK_INTERFACE names and this host does not have.
    """
    return choose(one_host, environ).address


def choose(one_host: bool, environ: Mapping[str, str] = os.environ) -> Choice:
    """Return the address, as `own_address` does, and a text that says what chose it."""
    if name := settings.INTERFACE.read(environ):
        address = address_of(name)
        if not address:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"{OURS} must name an interface of this host with an IPv4 address, got {name!r}; "
                f"there are {names}"
            )
        return Choice(address, OURS)
    if one_host:
        return Choice("127.0.0.1", "all ranks on one host")
    for variable in THEIRS:
        for name in environ.get(variable, "").split(","):
            # NCCL writes =eth0 for a name that is to be taken exactly.
            if address := address_of(name.lstrip("=")):
                return Choice(address, variable)
    master = environ.get("MASTER_ADDR", "")
    for other, by in ((master, f"the way to MASTER_ADDR={master}"), (_ANYWHERE, "default route")):
        address = _address_towards(other)
        # A host's own name may lead to its loopback, which no other host reaches.
        if address and not address.startswith("127."):
            return Choice(address, by)
    found = [each for each in interfaces().values() if not each.startswith("127.")]
    return Choice(found[0], "the first there is") if found else Choice("", "")


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, the loopback's included, by name."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address}


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address; "" where there is no such interface, or no address."""
    if len(interface) > _NAME_BYTES:  # the system would cut it to the name of another
        return ""
    request = struct.pack("256s", interface.encode(errors="replace"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def address_towards(host: str, port: int = 9) -> str:
    """Return the address under which this host reaches another, and is reached from there.

    Nothing is sent. Raises OSError where there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def _address_towards(host: str) -> str:
    try:
        return address_towards(host) if host else ""
    except OSError:
        return ""


def _open_note() -> int:
    """Return the descriptor of an empty file in memory; off Linux, of one without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gtopk-note")
    file, path = tempfile.mkstemp(prefix="gtopk-note-")
    os.unlink(path)
    return file


class LostRank(NamedTuple):
    """A rank that is lost, and the reason as errors give it."""

    rank: int
    why: str


class Heartbeat:
    """A rank's companion, from `start` to `close`.

    introduction: the companion's address, and this rank's share of the job's secret, in JSON's
                  types; ranks exchange theirs before `start`.
    on_lost: called with each rank that is lost, in the heartbeat's thread.
    """

    _setting: Setting  # from `start` on

    def __init__(
        self, transport: Transport, timeout_seconds: float, warning_seconds: float, launcher: int
    ) -> None:
        """Open the companion's address; raise ValueError for an interface that this host lacks.

        launcher: as of `Setting`.
        """
        address = own_address(one_host=len(transport.neighbours()) == transport.size)
        self.on_lost: Callable[[LostRank], None] = lambda lost: None
        self._rank = transport.rank
        self._timeout_seconds = timeout_seconds
        self._warning_seconds = warning_seconds
        self._launcher = launcher
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if address:
            self._socket.bind((address, 0))
        port = self._socket.getsockname()[1]  # 0 of one that is not bound
        share = secrets.token_hex()
        self.introduction: list[Any] = [socket.gethostname(), os.getpid(), address, port, share]
        # The companion shares it, and finds there the step of a rank that SIGKILL has ended.
        self._note_file = _open_note()
        write_note(self._note_file, 0, "")
        self._companion: subprocess.Popen[bytes] | None = None
        # Reentrant, for a handler of SIGTERM explains, and may run within another order.
        self._sending = threading.RLock()
        self._closing = False
        self._lost: list[LostRank] = []

    def start(self, introductions: Sequence[Sequence[Any]]) -> None:
        """Start the companion; introductions: every rank's, in rank order."""
        # Every rank contributes to the secret: none can choose it.
        shares = "".join(share for *_, share in introductions)
        self._setting = Setting(
            rank=self._rank,
            parent=os.getpid(),
            launcher=self._launcher,
            secret=hashlib.sha256(shares.encode()).hexdigest(),
            socket=self._socket.fileno(),
            note=self._note_file,
            timeout_seconds=self._timeout_seconds,
            warning_seconds=self._warning_seconds,
            peers=[Peer(rank, *place) for rank, (*place, _) in enumerate(introductions)],
        )
        # A daemon thread does not keep the program alive when it ends.
        threading.Thread(
            target=self._receive_losses, args=(self._begin(),), name="gtopk-heartbeat", daemon=True
        ).start()

    def lost(self, wait_seconds: float = 0.0) -> LostRank | None:
        """Return the first rank that was lost, after waiting for news of one for so long."""
        # No lock, and so no event: a handler of SIGTERM calls this, perhaps within another call.
        until = time.monotonic() + wait_seconds
        while not self._lost and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return self._lost[0] if self._lost else None

    def note(self, step: int, advice: str) -> None:
        """Store the step and advice that the companion reports if this rank ends silently."""
        # A closed descriptor's number may be another file's by now.
        if not self._closing:
            write_note(self._note_file, step, advice)

    def explain(self, why: str) -> None:
        """Give the companion the reason that it tells the others when this rank ends."""
        self._order(f"because {' '.join(why.split())}")

    def close(self) -> None:
        """Tell the others to stop watching this rank, as it leaves in good order."""
        # Before the order, so that `_receive_losses` does not replace the companion that follows
        # it; under the lock, within which it replaces one.
        with self._sending:
            self._closing = True
        self._order("leave")
        if self._companion is not None:
            self._await_end(self._companion)
        self._socket.close()
        os.close(self._note_file)

    def _await_end(self, companion: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            companion.wait(_LEAVE_SECONDS)
        companion.kill()
        companion.wait()
        with self._sending, contextlib.suppress(OSError):  # lines that it did not read
            assert companion.stdin is not None
            companion.stdin.close()

    def release_after_fork(self) -> None:
        """Release the companion in a process that was forked from the rank."""
        if self._companion is not None:
            self._companion.returncode = 0  # else Popen would wait for it in this process

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start a companion process, and return it."""
        companion = subprocess.Popen(
            command_of("companion"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._setting.socket, self._setting.note],
            # A signal to the rank's process group must not end the companion, which reports it.
            start_new_session=True,
        )
        assert companion.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed already
            companion.stdin.write(self._setting.line())
            companion.stdin.flush()
        self._companion = companion
        return companion

    def _order(self, line: str) -> None:
        companion = self._companion
        if companion is None or companion.stdin is None:
            return
        with self._sending, contextlib.suppress(OSError, ValueError):  # it was killed, or has left
            # Past the file's buffer, which refuses a write within another one.
            rest = f"{line}\n".encode(errors="replace")
            while rest:
                rest = rest[os.write(companion.stdin.fileno(), rest) :]

    def _receive_losses(self, companion: subprocess.Popen[bytes]) -> None:
        """Receive losses until the companion ends; replace a companion that was killed."""
        from collectives.transports.transport import print_line

        for left in reversed(range(_STARTS)):
            assert companion.stdout is not None
            with companion.stdout as reports:
                for line in reports:
                    # First: handling it may take long, and a rank that does not answer is killed.
                    self._order("heard")
                    self._note_loss(json.loads(line))
            if self._closing:
                return
            companion.wait()
            next_one = "another begins" if left else "the other ranks will give it up"
            own = self._setting.peers[self._rank]
            print_line(f"{own}: its companion was ended ({companion.returncode}); {next_one}")
            if left:
                with self._sending:
                    if self._closing:  # by now: its socket is closed
                        return
                    companion = self._begin()

    def _note_loss(self, report: Mapping[str, Any]) -> None:
        peer = self._setting.peers[report["lost"]]
        lost = LostRank(peer.rank, f"{report['why']}; host {peer.host}, pid {peer.pid}")
        self._lost.append(lost)
        self.on_lost(lost)
