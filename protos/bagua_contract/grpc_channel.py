"""Opens every gRPC channel of Bagua, without gRPC's own retries.

gRPC repeats a call that the server certainly did not see, as after its GOAWAY. If the repetition cannot connect, gRPC
loses parts of the call (seen with grpcio 1.85.1): the reader of the call then waits for ever, deadline or not, and so
does the close of the channel. Owners of calls repeat them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

Options = Sequence[tuple[str, str | int]]

_WITHOUT_RETRIES = (("grpc.enable_retries", 0),)
# For an end of a connection that receives small messages at a slow pace. gRPC measures the bandwidth with a ping after
# almost each of them, and sizes a stream's window by it, from 4 MiB on; here the window stays at 4 MiB.
WITHOUT_PROBING: Options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20))


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, options: Options = ()
) -> grpc.Channel:
    """Opens a channel to `address`; plain without credentials. Returns at once: the first call connects."""
    all_options = [*options, *_WITHOUT_RETRIES]
    if credentials is None:
        return grpc.insecure_channel(address, options=all_options)
    return grpc.secure_channel(address, credentials, options=all_options)
