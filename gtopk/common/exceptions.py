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
    """Horovod's error for a framework version that differs from the one it was built against.

    gtopk is built against no framework, so it never raises this; scripts may catch or raise it.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
