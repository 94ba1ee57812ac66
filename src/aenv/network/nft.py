"""nftables through libnftables, inside this process: one call is one atomic transaction."""

from __future__ import annotations

import ctypes
import json
import socket
import threading
from typing import Any

from aenv.errors import OperationFailed, SetupError

_NETLINK_NETFILTER = 12
_OUTPUT_JSON = 1 << 4
_OUTPUT_TERSE = 1 << 11


class Nftables:
    """Runs commands in the network namespace of the calling thread. Safe to call from several threads.

    Raises SetupError when the library is missing.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libnftables.so.1")
        except OSError as error:
            raise SetupError(f"libnftables is missing: {error}", remedy="apt-get install libnftables1") from error
        library.nft_ctx_new.restype = ctypes.c_void_p
        library.nft_ctx_new.argtypes = [ctypes.c_uint32]
        library.nft_ctx_free.restype = None
        library.nft_ctx_free.argtypes = [ctypes.c_void_p]
        for name in ("nft_ctx_buffer_error", "nft_ctx_buffer_output"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        for name in ("nft_ctx_get_error_buffer", "nft_ctx_get_output_buffer"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
            getattr(library, name).restype = ctypes.c_char_p
        library.nft_ctx_output_set_flags.restype = None
        library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._library = library
        # The library keeps some state in globals and makes no promise about threads; a transaction takes 0.3 ms.
        self._lock = threading.Lock()

    def run(self, commands: str) -> None:
        """Apply ``commands`` (the language of ``nft -f``) all or nothing. Raises OperationFailed."""
        self._run(commands, 0)

    def list(self, command: str) -> list[dict[str, Any]]:
        """Objects that ``command`` (for example ``list ruleset``) prints, without the elements of sets."""
        answer: list[dict[str, Any]] = json.loads(self._run(command, _OUTPUT_JSON | _OUTPUT_TERSE))["nftables"]
        return answer

    def _run(self, commands: str, flags: int) -> str:
        library = self._library
        with self._lock:
            # When the library cannot open its socket it ends the whole process; find out about a lack of file
            # descriptors or of kernel support first, as an OSError.
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER).close()
            # A context belongs to the namespace in which it was made.
            context = library.nft_ctx_new(0)
            if not context:
                raise MemoryError("nft_ctx_new")
            try:
                library.nft_ctx_buffer_error(context)
                library.nft_ctx_buffer_output(context)
                library.nft_ctx_output_set_flags(context, flags)
                if library.nft_run_cmd_from_buffer(context, commands.encode()) != 0:
                    text = (library.nft_ctx_get_error_buffer(context) or b"").decode(errors="replace")
                    raise OperationFailed(f"nftables refused a rule set: {' '.join(text.split())[:500]}")
                return (library.nft_ctx_get_output_buffer(context) or b"").decode(errors="replace")
            finally:
                library.nft_ctx_free(context)
