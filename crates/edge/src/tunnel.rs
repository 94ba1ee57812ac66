//! WebSockets and other upgraded connections: bytes both ways until either side ends.

use bytes::Bytes;
use tokio::io::{copy_bidirectional_with_sizes, AsyncWriteExt};

use crate::client::ClientIo;
use crate::proxy::Exchange;
use crate::upstream::Socket;

/// Bytes held per direction.
const BUFFER: usize = 16 * 1024;

/// The side of a tunnel that is already open when the client gets its 101.
pub struct Tunnel {
    pub upstream: Socket,
    /// What the guest sent behind its 101.
    pub read: Bytes,
    pub exchange: Exchange,
}

/// Runs a tunnel to its end. `sent` is what the client sent behind its request.
pub async fn run(mut client: ClientIo, sent: Bytes, tunnel: Tunnel) {
    let Tunnel {
        mut upstream,
        read,
        exchange,
    } = tunnel;
    let copy = async {
        upstream.write_all(&sent).await?;
        client.write_all(&read).await?;
        copy_bidirectional_with_sizes(&mut client, &mut upstream, BUFFER, BUFFER).await
    };
    let copied = tokio::select! {
        biased;
        () = exchange.client().stopped() => None,
        copied = copy => Some(copied),
    };
    if let Some(Err(_)) = copied {
        // One side broke off; the other must not take that for an end.
        exchange.client().abort();
    }
    drop(client);
    drop(upstream);
    drop(exchange);
}
