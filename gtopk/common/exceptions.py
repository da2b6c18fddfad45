"""Horovod's import path for its exceptions."""

from ..errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the text of HorovodVersionMismatchError."""
    return f"built against {name} {installed_version}, and found {name} {version}"


class HorovodVersionMismatchError(ImportError):
    """Horovod's error for a framework of another version than it was built against.

    gtopk never raises it, as it is built against none; scripts may catch or raise it.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
